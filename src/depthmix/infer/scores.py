"""Log-probabilities of given tokens, by the model's full forward pass, without a cache.

Owns the dtype of this pass. Logits are computed in chunks, so a long text's never all exist at
once.
"""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from depthmix.infer.results import Alternative, TokenScore
from depthmix.nn import Transformer
from depthmix.nn.transformer import Hidden

# number of tokens whose logits are computed at once
CHUNK_TOKENS = 1024


def compute_hidden(
    model: Transformer,
    tokens: Int[Tensor, "B T"],
    selector: str | None,
    document_ids: Int[Tensor, "B T"] | None = None,
) -> Hidden:
    """The model's full forward pass, in the dtypes used in training."""
    kind = tokens.device.type
    # routers still score in float32
    with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
        return model.compute_hidden(tokens, selector=selector, document_ids=document_ids)


def iterate_logits(
    model: Transformer, hidden: Float[Tensor, "T D"]
) -> Iterator[Float[Tensor, "C V"]]:
    """float32 logits of all tokens, one chunk at a time."""
    weight = model.head.weight
    for part in hidden.to(weight.dtype).split(CHUNK_TOKENS):
        # bf16 logits are too coarse to compare log-probabilities
        if weight.is_cuda and weight.dtype == torch.bfloat16:
            yield torch.mm(part, weight.T, out_dtype=torch.float32)
        else:
            yield model.head(part).float()


@torch.inference_mode()
def score_tokens(
    model: Transformer, tokens: Sequence[int], selector: str | None, top: int
) -> list[TokenScore]:
    """Return the log-probability of each token but the first, with the `top` most probable."""
    if len(tokens) < 2:
        return []
    ids = torch.tensor([tokens], device=model.embedding.weight.device)
    found = compute_hidden(model, ids[:, :-1], selector)
    scores: list[TokenScore] = []
    for logits_CV in iterate_logits(model, found.hidden[0]):
        first = len(scores) + 1
        logprobs_CV = logits_CV.log_softmax(-1)
        targets_C1 = ids[0, first : first + len(logits_CV), None]
        own = logprobs_CV.gather(1, targets_C1).squeeze(1).tolist()
        best_CK, place_CK = logprobs_CV.topk(min(top, logprobs_CV.shape[1]), dim=1)
        places = zip(place_CK.tolist(), best_CK.tolist(), strict=True)
        for logprob, (others, values) in zip(own, places, strict=True):
            alternatives = tuple(map(Alternative, others, values))
            scores.append(TokenScore(logprob, alternatives))
    return scores
