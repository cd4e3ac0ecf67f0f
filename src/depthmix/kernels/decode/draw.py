"""Sampling on the device: penalties, temperature, filters, noise, log-probability.

Owns the sampling state of every cache row, and three kernels that divide a row's vocabulary among
programs and never sort. They draw the same tokens as `infer.sampling.sample`. Tokens far below the
best one can neither win nor carry mass, so the rest is put into narrow bins, which locate a
filter's cutoff up to one bin. The winner without filters is found at the same time, in float32, and
exactly only among close candidates: usually the filters keep it, and the row is done.
Knows nothing of requests, caches and models.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from depthmix.kernels.compiling import jit
from depthmix.kernels.decode.stages import LOWEST_RANK, find_ranked

# tokens at a time; sums for log-probabilities are split only here, whatever the number of parts
BLOCK = tl.constexpr(1024)
# Noise lies between -3.7 and 36.8, so a token 41 below the best one can never win, and from 29 on
# its mass is 0. 4096 bins of 1/96 end at 42.7: tokens past that can be ignored altogether.
BINS = tl.constexpr(4096)
BINS_EACH = tl.constexpr(96.0)
# If the ratio of two chances is nearer to 1 than this, float32 cannot tell which is larger: their
# relative errors are below 3e-5 (see `_find_chance`).
CLOSE = tl.constexpr(1 - 2.0**-12)
# below the chance of any token that has one: exp(-42.7) / 36.8
_LEAST_CHANCE = tl.constexpr(1e-30)
# most tokens at a filter's edge that are listed; with more, the whole row is read again
MOST_LISTED = tl.constexpr(4096)
# int64 numbers per row that `_weigh` passes to `_sift`
PLAN = tl.constexpr(8)

_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
# a lower temperature separates no two scores further than this one, and has no finite inverse
_COLDEST = tl.constexpr(1e-300)
_NO_ID = tl.constexpr(2**31 - 1)
# 2^52: adding it to a smaller float64 rounds that to an integer, half to even
_ROUNDER = tl.constexpr(2.0**52)
_ROUNDER_BITS = tl.constexpr(0x4330000000000000)
# SplitMix64's constants, as int64 represents them
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - 2**64)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9 - 2**64)
_SECOND = tl.constexpr(0x94D049BB133111EB - 2**64)
# 1.5 * 2^52: adding it leaves an integer, even a negative one, in the lowest bits
_WHOLE = tl.constexpr(1.5 * 2.0**52)


@jit
def _mix(x):
    """SplitMix64's step."""
    # `>>` alone replicates the sign bit
    x = x + _GOLDEN
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _FIRST
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _SECOND
    return x ^ ((x >> 31) & ((1 << 33) - 1))


@jit
def _draw_bits(key, token):
    """52 random bits per token, above 12 others."""
    return _mix((key + token.to(tl.int64)) * _GOLDEN)


@jit
def _draw_gumbel(key, token):
    """Gumbel noise per token, float64."""
    bits = _draw_bits(key, token)
    uniform = (((bits >> 12) & ((1 << 52) - 1)).to(tl.float64) + 0.5) * (2.0**-52)
    return -tl.log(-tl.log(uniform))


@jit
def _find_chance(key, token, shifted):
    """exp(score + noise) in float32: the largest belongs to the largest sum.

    This is exp(score) / -log(u), whose factors are both accurate: exp to 6e-6, since its argument
    is rounded at magnitudes up to 43; the logarithm to 2e-5, as long as nothing cancels. Close to
    1, u loses in float32 the digits that determine its logarithm, but 1 - u is known exactly.
    """
    bits = _draw_bits(key, token)
    is_upper = bits < 0
    # u or 1 - u, whichever is at most a half
    near = ((bits ^ (bits >> 63)) >> 12) & ((1 << 52) - 1)
    near = (near.to(tl.float32) + 0.5) * (2.0**-52)
    wait = -tl.log(tl.where(is_upper, 1.0 - near, near))
    series = near * (1.0 + near * (1.0 / 2 + near * (1.0 / 3 + near * (1.0 / 4))))
    wait = tl.where(is_upper & (near < 2.0**-6), series, wait)
    return tl.exp(shifted.to(tl.float32)) / wait


@jit
def _make_order(score):
    """Map scores, none of them NaN, to int32 in the same order; both zeros are equal."""
    bits = score.to(tl.int32, bitcast=True)
    bits = tl.where(score == 0.0, 0, bits)
    # floats sort like their bits, except that negative ones are reversed
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def _make_rank(order, token):
    """A number that grows with the score; of equal scores, the lower id ranks higher."""
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@jit
def _find_score(rank):
    """Extract the score from a rank."""
    order = (rank >> 32).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def _load_penalties(shares, num_rows):
    """A row's penalties of repetition, frequency and presence."""
    repetition = tl.load(shares + 3 * num_rows)
    return repetition, tl.load(shares + 4 * num_rows), tl.load(shares + 5 * num_rows)


@jit
def _load_scores(logits, seen, penalties, token, inside):
    """Load raw logits of these tokens, and their scores: penalised, and never NaN or +inf."""
    raw = tl.load(logits + token, mask=inside, other=float("-inf")).to(tl.float32)
    score = raw
    if seen is not None:  # noqa: SIM102 - known when the kernel is compiled, the other is not
        # penalties that are off change nothing, not even by rounding
        if (penalties[0] != 1.0) | (penalties[1] != 0.0) | (penalties[2] != 0.0):
            occurred = tl.load(seen + token, mask=inside, other=0)
            wide = raw.to(tl.float64)
            wide = tl.where(raw > 0, wide / penalties[0], wide * penalties[0])
            score = tl.where(occurred != 0, wide.to(tl.float32), score)
            times = (occurred >> 1).to(tl.float64)
            # the product is exact, so it does not matter whether it is rounded before the sum
            wide = score.to(tl.float64) - (penalties[1] * times + penalties[2])
            score = tl.where(times > 0, wide.to(tl.float32), score)
    score = tl.where(score == score, score, float("-inf"))
    return raw, tl.minimum(score, _LARGEST)


@jit
def _shift_scores(score, top, temperature):
    """Log-probabilities minus the best one, float64."""
    below = score.to(tl.float64) - top
    # a branchless division in three steps, with the same rounding as the slow one
    inverse = 1.0 / temperature
    quotient = below * inverse
    better = tl.fma(tl.fma(-quotient, temperature, below), inverse, quotient)
    # for -inf the correction is NaN
    return tl.where(better == better, better, quotient)


@jit
def _find_bin(shifted):
    """The bin of a token, int32; `BINS` for tokens in no bin."""
    return tl.minimum(shifted.to(tl.float32) * -BINS_EACH, BINS * 1.0).to(tl.int32)


@jit
def _take_power(shifted, doublings: tl.constexpr):
    """exp(shifted) * 2^doublings for tokens in a bin, float64; undefined for others.

    Follows libdevice's exp step by step, without its branches, which cost more than all the rest.
    """
    one = tl.full((), 1.0, tl.float64)
    power = tl.fma(
        shifted,
        tl.full((), 1.4426950408889634, tl.float64),
        tl.full((), _WHOLE, tl.float64),
    )
    whole = power - tl.full((), _WHOLE, tl.float64)
    rest = tl.fma(whole, tl.full((), -0.6931471805599453, tl.float64), shifted)
    rest = tl.fma(whole, tl.full((), -2.3190468138462996e-17, tl.float64), rest)
    sum = tl.fma(
        rest,
        tl.full((), 2.502232253650299e-08, tl.float64),
        tl.full((), 2.763090348817311e-07, tl.float64),
    )
    sum = tl.fma(sum, rest, tl.full((), 2.755751454588244e-06, tl.float64))
    sum = tl.fma(sum, rest, tl.full((), 2.4801491039099165e-05, tl.float64))
    sum = tl.fma(sum, rest, tl.full((), 0.00019841269589115497, tl.float64))
    sum = tl.fma(sum, rest, tl.full((), 0.001388888894591638, tl.float64))
    sum = tl.fma(sum, rest, tl.full((), 0.008333333333455043, tl.float64))
    sum = tl.fma(sum, rest, tl.full((), 0.041666666666519754, tl.float64))
    sum = tl.fma(sum, rest, tl.full((), 0.16666666666666477, tl.float64))
    sum = tl.fma(sum, rest, tl.full((), 0.5000000000000012, tl.float64))
    sum = tl.fma(sum, rest, one)
    sum = tl.fma(sum, rest, one)
    bits = sum.to(tl.int64, bitcast=True) + (power.to(tl.int64, bitcast=True) << 52)
    return (bits + (doublings << 52)).to(tl.float64, bitcast=True)


@jit
def _find_mass(shifted):
    """Probability relative to the best token as an integer, whose sums do not depend on order."""
    rounded = _take_power(shifted, 40) + tl.full((), _ROUNDER, tl.float64)
    mass = rounded.to(tl.int64, bitcast=True) - _ROUNDER_BITS
    return tl.where(shifted > -40.0, mass, 0)


@jit
def _reach_share(shifted, min_p):
    """Whether tokens are probable enough for min_p; undefined for tokens in no bin."""
    return _take_power(shifted, 0) >= min_p


@jit
def _count(mask):
    """Count the true elements."""
    return tl.sum(mask.to(tl.int32), axis=0)


@jit
def _find_best(value, token):
    """The largest value and its token; ties go to the lowest id."""
    best = tl.max(value, axis=0)
    return best, tl.min(tl.where(value == best, token, _NO_ID), axis=0)


@jit
def _find_value(token, inside, logits, seen, penalties, top, temperature, key):
    """Score plus noise of single tokens, float64; -inf for tokens not `inside`."""
    _, score = _load_scores(logits, seen, penalties, token, inside)
    value = _shift_scores(score, top, temperature) + _draw_gumbel(key, token)
    return tl.where(inside, value, float("-inf"))


@jit
def _keep_better(
    best, best_token, chance, token, logits, seen, penalties, top, temperature, key, vocab
):
    """The best of a block and of the blocks before it, which have lower ids.

    Returns its chance and its id; if no token has a chance, 0 and an id that no token has.
    """
    block_best = tl.max(chance, axis=0)
    bound = tl.maximum(tl.maximum(best, block_best) * CLOSE, _LEAST_CHANCE)
    if block_best >= bound:
        close = chance >= bound
        first = tl.min(tl.where(close, token, _NO_ID), axis=0)
        if (_count(close) == 1) & (best < bound):
            best = block_best
            best_token = first
        else:
            # compare exactly, one by one, lowest id first
            candidate = tl.where(best >= bound, best_token, first)
            chosen = candidate
            best_value = tl.full((), float("-inf"), tl.float64)
            while candidate < _NO_ID:
                value = _find_value(
                    candidate,
                    candidate < vocab,
                    logits,
                    seen,
                    penalties,
                    top,
                    temperature,
                    key,
                )
                chosen = tl.where(value > best_value, candidate, chosen)
                best_value = tl.maximum(best_value, value)
                later = close & (token > candidate)
                candidate = tl.min(tl.where(later, token, _NO_ID), axis=0)
            own = tl.max(tl.where(token == chosen, chance, 0.0), axis=0)
            best = tl.where(chosen == best_token, best, own)
            best_token = chosen
    return best, best_token


@jit
def _join_parts(
    part_chance,
    part_token,
    logits,
    seen,
    penalties,
    top,
    temperature,
    key,
    vocab,
    parts: tl.constexpr,
):
    """The best token found by a row's programs, or an id that no token has."""
    part = tl.arange(0, parts)
    chance = tl.load(part_chance + part, cache_modifier=".cg")
    token = tl.load(part_token + part, cache_modifier=".cg")
    close = chance >= tl.maximum(tl.max(chance, axis=0) * CLOSE, _LEAST_CHANCE)
    winner = tl.min(tl.where(close, token, _NO_ID), axis=0)
    if _count(close) > 1:
        value = _find_value(
            token,
            close & (token < vocab),
            logits,
            seen,
            penalties,
            top,
            temperature,
            key,
        )
        _, winner = _find_best(value, token)
    return winner


@jit
def _share_blocks(part, vocab: tl.constexpr, parts: tl.constexpr):
    """First and end of this program's blocks."""
    blocks: tl.constexpr = (vocab + BLOCK - 1) // BLOCK
    each: tl.constexpr = (blocks + parts - 1) // parts
    first = part * each
    return first, tl.minimum(first + each, blocks)


@jit
def _arrive_last(arrivals, place, parts: tl.constexpr):
    """Whether all other programs of the row have stored their results."""
    # all threads must have stored before the arrival is counted
    tl.debug_barrier()
    before = tl.atomic_add(arrivals + place, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    return before == parts - 1


@jit
def _find_logprob(
    logits, block_top, block_sum, token, vocab: tl.constexpr, block_blocks: tl.constexpr
):
    """Log-probability under the model itself; `logits` and the blocks' sums are one row's."""
    blocks: tl.constexpr = (vocab + BLOCK - 1) // BLOCK
    number = tl.arange(0, block_blocks)
    tops = tl.load(block_top + number, mask=number < blocks, other=-_LARGEST)
    sums = tl.load(block_sum + number, mask=number < blocks, other=0.0)
    top = tl.max(tops, axis=0)
    total = tl.sum(sums * tl.exp(tops - top), axis=0)
    return tl.load(logits + token).to(tl.float32) - top - tl.log(total)


@jit
def _finish(
    place, row, token, logprob, step, counts, tokens, seen, out_token, out_logprob, num_rows, vocab
):
    """Output the token, and update the state that the row's next token needs."""
    tl.store(out_token + place, token.to(tl.int64))
    tl.store(out_logprob + place, logprob)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(counts + 2 * num_rows + row, step + 1)
    if seen is not None:
        own = seen + row * vocab + token
        tl.store(own, tl.load(own) + 2)


@jit(do_not_specialize=["row_of", "out_token", "out_logprob", "num_rows"])
def _rank_tokens(
    logits,
    row_of,
    shares,
    counts,
    tokens,
    seen,
    block_rank,
    block_top,
    block_sum,
    arrivals,
    out_token,
    out_logprob,
    stride,
    num_rows,
    vocab: tl.constexpr,
    parts: tl.constexpr,
    block_blocks: tl.constexpr,
    plain: tl.constexpr,
):
    """Find each block's best token, and the sum that log-probabilities need.

    With `plain`, only the best token is needed, and the last program to finish outputs it.
    """
    blocks: tl.constexpr = (vocab + BLOCK - 1) // BLOCK
    part = tl.program_id(0)
    place = tl.program_id(1).to(tl.int64)
    row = tl.load(row_of + place)
    if row < 0:
        if part == 0:
            tl.store(out_token + place, tl.full((), 0, tl.int64))
            tl.store(out_logprob + place, 0.0)
        return
    logits += place * stride
    block_rank += place * blocks
    own_seen = seen
    one = tl.full((), 1.0, tl.float64)
    penalties = (one, one - 1, one - 1)
    if seen is not None:
        own_seen = seen + row * vocab
        if not plain:
            penalties = _load_penalties(shares + row, num_rows)
    first, end = _share_blocks(part, vocab, parts)
    for number in range(first, end):
        token = number * BLOCK + tl.arange(0, BLOCK)
        inside = token < vocab
        raw, score = _load_scores(logits, own_seen, penalties, token, inside)
        rank = tl.where(inside, _make_rank(_make_order(score), token), LOWEST_RANK)
        tl.store(block_rank + number, tl.max(rank, axis=0))
        if not plain:
            # kept finite, since a block of -inf would give inf - inf
            top = tl.maximum(tl.max(raw, axis=0), -_LARGEST)
            tl.store(block_top + place * blocks + number, top)
            tl.store(block_sum + place * blocks + number, tl.sum(tl.exp(raw - top), axis=0))
    if plain:  # noqa: SIM102 - as above
        if _arrive_last(arrivals, place, parts):
            every = tl.arange(0, block_blocks)
            ranks = tl.load(
                block_rank + every,
                mask=every < blocks,
                other=LOWEST_RANK,
                cache_modifier=".cg",
            )
            best = find_ranked(tl.max(ranks, axis=0))
            step = tl.load(counts + 2 * num_rows + row)
            _finish(
                place,
                row,
                best,
                0.0,
                step,
                counts,
                tokens,
                seen,
                out_token,
                out_logprob,
                num_rows,
                vocab,
            )
            tl.store(arrivals + place, 0)


@jit(do_not_specialize=["row_of", "out_token", "out_logprob", "num_rows"])
def _weigh(
    logits,
    row_of,
    shares,
    counts,
    tokens,
    seen,
    block_rank,
    block_top,
    block_sum,
    part_chance,
    part_token,
    part_mass,
    bin_count,
    bin_mass,
    plan,
    arrivals,
    out_token,
    out_logprob,
    stride,
    num_rows,
    vocab: tl.constexpr,
    parts: tl.constexpr,
    block_blocks: tl.constexpr,
):
    """Draw if neither top_k nor top_p rejects the winner; else find the bins of their cutoffs.

    A filter keeps all tokens before its cutoff, in order of falling score and, among equals, rising
    id. Bins before `low` are kept entirely, those after `high` not at all. With both filters, the
    total that top_p refers to depends on top_k's cutoff inside its bin, so there may be several
    bins in between.
    """
    blocks: tl.constexpr = (vocab + BLOCK - 1) // BLOCK
    part = tl.program_id(0)
    place = tl.program_id(1).to(tl.int64)
    row = tl.load(row_of + place)
    if row < 0:
        return
    temperature = tl.load(shares + row)
    top_p = tl.load(shares + num_rows + row)
    min_p = tl.load(shares + 2 * num_rows + row)
    penalties = _load_penalties(shares + row, num_rows)
    top_k = tl.load(counts + row)
    seed = tl.load(counts + num_rows + row)
    step = tl.load(counts + 2 * num_rows + row)
    every = tl.arange(0, block_blocks)
    ranks = tl.load(block_rank + place * blocks + every, mask=every < blocks, other=LOWEST_RANK)
    best_rank = tl.max(ranks, axis=0)
    top = _find_score(best_rank)
    logits += place * stride
    block_top += place * blocks
    block_sum += place * blocks
    plan += place * PLAN
    if (temperature == 0) | (top == float("-inf")):
        # every filter keeps the best token
        if part == 0:
            token = find_ranked(best_rank)
            logprob = _find_logprob(logits, block_top, block_sum, token, vocab, block_blocks)
            _finish(
                place,
                row,
                token,
                logprob,
                step,
                counts,
                tokens,
                seen,
                out_token,
                out_logprob,
                num_rows,
                vocab,
            )
            tl.store(plan, tl.full((), 0, tl.int64))
        return
    temperature = tl.maximum(temperature, _COLDEST)
    has_k = (top_k > 0) & (top_k < vocab)
    has_p = top_p < 1
    own_seen = seen
    if seen is not None:
        own_seen = seen + row * vocab
    part_chance += place * 2 * parts
    part_token += place * 2 * parts
    part_mass += place * parts
    bin_count += place * BINS
    bin_mass += place * BINS
    # If all tokens from some bin on, even if that were the whole vocabulary, have less mass than
    # top_p alone leaves out, its cutoff comes before them. One nat more allows for rounding.
    left_out = tl.maximum(((1 - top_p) / vocab).to(tl.float32), 1e-37)
    last_bin = tl.minimum((1.0 - tl.log(left_out)) * BINS_EACH, BINS - 1.0).to(tl.int32)
    last_bin = tl.where(has_k, BINS - 1, last_bin)
    key = _mix(_mix(seed) + step)
    best = tl.full((), 0.0, tl.float32)
    best_token = tl.full((), _NO_ID, tl.int32)
    masses = tl.zeros((BLOCK,), tl.int64)
    first, end = _share_blocks(part, vocab, parts)
    for number in range(first, end):
        token = number * BLOCK + tl.arange(0, BLOCK)
        _, score = _load_scores(logits, own_seen, penalties, token, token < vocab)
        shifted = _shift_scores(score, top, temperature)
        bin = _find_bin(shifted)
        shown = (token < vocab) & (bin < BINS)
        if has_k:
            one = tl.full((BLOCK,), 1, tl.int32)
            tl.atomic_add(bin_count + bin, one, mask=shown, sem="relaxed")
        if has_p:
            mass = tl.where(shown, _find_mass(shifted), 0)
            masses += mass
            heavy = (mass > 0) & (bin <= last_bin)
            tl.atomic_add(bin_mass + bin, mass, mask=heavy, sem="relaxed")
        chance = tl.where(shown, _find_chance(key, token, shifted), 0.0)
        if min_p > 0:
            chance = tl.where(_reach_share(shifted, min_p), chance, 0.0)
        best, best_token = _keep_better(
            best,
            best_token,
            chance,
            token,
            logits,
            own_seen,
            penalties,
            top,
            temperature,
            key,
            vocab,
        )
    tl.store(part_chance + part, best)
    tl.store(part_token + part, best_token)
    if has_p:
        tl.store(part_mass + part, tl.sum(masses, axis=0))
    if _arrive_last(arrivals, place, parts):
        bin = tl.arange(0, BINS)
        # issue these loads before anything waits
        with_count = bin < tl.where(has_k, BINS, 0)
        with_mass = bin < tl.where(has_p, BINS, 0)
        count = tl.load(bin_count + bin, mask=with_count, other=0, cache_modifier=".cg")
        mass = tl.load(bin_mass + bin, mask=with_mass, other=0, cache_modifier=".cg")
        winner = _join_parts(
            part_chance,
            part_token,
            logits,
            own_seen,
            penalties,
            top,
            temperature,
            key,
            vocab,
            parts,
        )
        # there always is a winner; checked again, because a wrong id would write out of bounds
        winner = tl.where(winner < vocab, winner, find_ranked(best_rank).to(tl.int32))
        logprob = _find_logprob(logits, block_top, block_sum, winner, vocab, block_blocks)
        is_open = tl.full((), 0, tl.int64)
        if has_k | has_p:
            # reset for the next step
            tl.store(bin_count + bin, tl.zeros((BINS,), tl.int32), mask=with_count)
            tl.store(bin_mass + bin, tl.zeros((BINS,), tl.int64), mask=with_mass)
            every_part = tl.arange(0, parts)
            mass_there = every_part < tl.where(has_p, parts, 0)
            total = tl.sum(
                tl.load(part_mass + every_part, mask=mass_there, other=0, cache_modifier=".cg"),
                axis=0,
            )
            _, own_score = _load_scores(logits, own_seen, penalties, winner, winner < vocab)
            own_bin = _find_bin(_shift_scores(own_score, top, temperature))
            # Is the winner's whole bin kept? For a single filter this is quickly known.
            count_to = tl.sum(tl.where(bin <= own_bin, count, 0), axis=0)
            mass_to = tl.sum(tl.where(bin <= own_bin, mass, 0), axis=0)
            kept_k = (count_to < top_k) | (top_k <= 0) | (top_k >= vocab)
            kept_p = (own_bin <= last_bin) & (mass_to.to(tl.float64) < top_p * total.to(tl.float64))
            is_kept = kept_k & (kept_p | (top_p >= 1))
            if (has_k & has_p) | (is_kept == 0):
                counts_to = tl.cumsum(count, axis=0).to(tl.int64)
                # a cutoff past all bins rejects no token that matters
                edge = tl.sum((counts_to < top_k).to(tl.int32), axis=0)
                edge = tl.where(has_k, edge, BINS)
                count_before = tl.sum(tl.where(bin < edge, count, 0), axis=0)
                low = edge
                high = edge
                mass_before = total
                mass_before_low = total
                if has_p:
                    mass_through = total
                    if has_k:
                        mass_before = tl.sum(tl.where(bin < edge, mass, 0), axis=0)
                        mass_through = tl.sum(tl.where(bin <= edge, mass, 0), axis=0)
                    wide = tl.cumsum(mass, axis=0).to(tl.float64)
                    least = top_p * mass_before.to(tl.float64)
                    most = top_p * mass_through.to(tl.float64)
                    low = tl.minimum(edge, tl.sum((wide < least).to(tl.int32), axis=0))
                    high = tl.minimum(edge, tl.sum((wide < most).to(tl.int32), axis=0))
                    mass_before_low = tl.sum(tl.where(bin < low, mass, 0), axis=0)
                if own_bin >= low:
                    is_open = tl.full((), 1, tl.int64)
                    tl.store(plan + 1, low.to(tl.int64))
                    tl.store(plan + 2, high.to(tl.int64))
                    tl.store(plan + 3, edge.to(tl.int64))
                    tl.store(plan + 4, count_before.to(tl.int64))
                    tl.store(plan + 5, mass_before)
                    tl.store(plan + 6, mass_before_low)
                    tl.store(plan + 7, total)
        tl.store(plan, is_open)
        if is_open == 0:
            _finish(
                place,
                row,
                winner,
                logprob,
                step,
                counts,
                tokens,
                seen,
                out_token,
                out_logprob,
                num_rows,
                vocab,
            )
        tl.store(arrivals + place, 0)


@jit
def _read_edge(logits, seen, penalties, listed, is_listed, first, length, top, temperature):
    """Read some of the tokens at the edge, or of all tokens if there were too many to list.

    Returns their ids, whether they exist, their scores as int32 and relative to the best, and bins.
    """
    number = first + tl.arange(0, BLOCK)
    inside = number < length
    num_listed = tl.where(is_listed, length, 0)
    token = tl.load(listed + number, mask=number < num_listed, other=0, cache_modifier=".cg")
    token = tl.where(is_listed, token, number)
    _, score = _load_scores(logits, seen, penalties, token, inside)
    shifted = _shift_scores(score, top, temperature)
    return token, inside, _make_order(score), shifted, _find_bin(shifted)


@jit
def _weigh_kept(
    logits,
    seen,
    penalties,
    listed,
    is_listed,
    length,
    top,
    temperature,
    top_k,
    edge,
    count_before,
    mass_before,
):
    """The mass of the `top_k` best tokens, the last of which lies in bin `edge`."""
    wanted = top_k - count_before
    # bisect for the score of the last token kept, between the bin's lowest and its highest
    low = tl.full((), 2**31 - 1, tl.int64)
    high = tl.full((), -(2**31), tl.int64)
    for first in range(0, length, BLOCK):
        _, inside, order, _, bin = _read_edge(
            logits, seen, penalties, listed, is_listed, first, length, top, temperature
        )
        there = inside & (bin == edge)
        wide = order.to(tl.int64)
        low = tl.minimum(low, tl.min(tl.where(there, wide, 2**31 - 1), axis=0))
        high = tl.maximum(high, tl.max(tl.where(there, wide, -(2**31)), axis=0))
    while low < high:
        middle = (low + high + 1) >> 1
        count = tl.full((), 0, tl.int64)
        for first in range(0, length, BLOCK):
            _, inside, order, _, bin = _read_edge(
                logits, seen, penalties, listed, is_listed, first, length, top, temperature
            )
            there = inside & (bin == edge) & (order.to(tl.int64) >= middle)
            count += tl.sum(there.to(tl.int64), axis=0)
        enough = count >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    above = tl.full((), 0, tl.int64)
    last_mass = tl.full((), 0, tl.int64)
    total = mass_before
    for first in range(0, length, BLOCK):
        _, inside, order, shifted, bin = _read_edge(
            logits, seen, penalties, listed, is_listed, first, length, top, temperature
        )
        there = inside & (bin == edge)
        mass = _find_mass(shifted)
        higher = there & (order.to(tl.int64) > low)
        above += tl.sum(higher.to(tl.int64), axis=0)
        total += tl.sum(tl.where(higher, mass, 0), axis=0)
        same = there & (order.to(tl.int64) == low)
        last_mass = tl.maximum(last_mass, tl.max(tl.where(same, mass, 0), axis=0))
    # tokens with equal scores have equal mass, whichever of them are kept
    return total + (wanted - above) * last_mass


@jit(do_not_specialize=["row_of", "out_token", "out_logprob", "num_rows"])
def _sift(
    logits,
    row_of,
    shares,
    counts,
    tokens,
    seen,
    block_rank,
    block_top,
    block_sum,
    part_chance,
    part_token,
    listed,
    num_listed,
    plan,
    arrivals,
    out_token,
    out_logprob,
    stride,
    num_rows,
    vocab: tl.constexpr,
    parts: tl.constexpr,
    block_blocks: tl.constexpr,
):
    """Draw from the tokens that top_k and top_p keep.

    The best of the tokens certain to be kept wins, unless one at the edge is better. Then check
    whether that one is kept. If not, no token ranked below it is: try the best of those above.
    """
    blocks: tl.constexpr = (vocab + BLOCK - 1) // BLOCK
    part = tl.program_id(0)
    place = tl.program_id(1).to(tl.int64)
    row = tl.load(row_of + place)
    plan += place * PLAN
    if row < 0:
        return
    if tl.load(plan) == 0:
        return
    low = tl.load(plan + 1)
    high = tl.load(plan + 2)
    edge = tl.load(plan + 3)
    temperature = tl.load(shares + row)
    top_p = tl.load(shares + num_rows + row)
    min_p = tl.load(shares + 2 * num_rows + row)
    penalties = _load_penalties(shares + row, num_rows)
    top_k = tl.load(counts + row)
    seed = tl.load(counts + num_rows + row)
    step = tl.load(counts + 2 * num_rows + row)
    every = tl.arange(0, block_blocks)
    ranks = tl.load(block_rank + place * blocks + every, mask=every < blocks, other=LOWEST_RANK)
    best_rank = tl.max(ranks, axis=0)
    top = _find_score(best_rank)
    logits += place * stride
    listed += place * MOST_LISTED
    own_seen = seen
    if seen is not None:
        own_seen = seen + row * vocab
    temperature = tl.maximum(temperature, _COLDEST)
    key = _mix(_mix(seed) + step)
    both = (edge < BINS) & (top_p < 1)
    # with both filters, the mass that top_k keeps of its bin is needed
    weighed_bin = tl.where(both, edge, high)
    sure = tl.full((), 0.0, tl.float32)
    sure_token = tl.full((), _NO_ID, tl.int32)
    open_ = tl.full((), 0.0, tl.float32)
    open_token = tl.full((), _NO_ID, tl.int32)
    first, end = _share_blocks(part, vocab, parts)
    for number in range(first, end):
        token = number * BLOCK + tl.arange(0, BLOCK)
        inside = token < vocab
        _, score = _load_scores(logits, own_seen, penalties, token, inside)
        shifted = _shift_scores(score, top, temperature)
        bin = _find_bin(shifted)
        inside = inside & (bin < BINS)
        # many blocks have no token that may be kept
        if _count(inside & (bin <= weighed_bin)) > 0:
            chance = tl.where(inside, _find_chance(key, token, shifted), 0.0)
            if min_p > 0:
                chance = tl.where(_reach_share(shifted, min_p), chance, 0.0)
            between = inside & (bin >= low) & (bin <= high)
            sure, sure_token = _keep_better(
                sure,
                sure_token,
                tl.where(bin < low, chance, 0.0),
                token,
                logits,
                own_seen,
                penalties,
                top,
                temperature,
                key,
                vocab,
            )
            noted = between | (inside & (bin == weighed_bin))
            num_noted = _count(noted)
            if num_noted > 0:
                open_, open_token = _keep_better(
                    open_,
                    open_token,
                    tl.where(between, chance, 0.0),
                    token,
                    logits,
                    own_seen,
                    penalties,
                    top,
                    temperature,
                    key,
                    vocab,
                )
                begin = tl.atomic_add(num_listed + place, num_noted, sem="relaxed")
                at = begin + tl.cumsum(noted.to(tl.int32), axis=0) - 1
                tl.store(listed + at, token, mask=noted & (at < MOST_LISTED))
    part_chance += place * 2 * parts
    part_token += place * 2 * parts
    tl.store(part_chance + part, sure)
    tl.store(part_token + part, sure_token)
    tl.store(part_chance + parts + part, open_)
    tl.store(part_token + parts + part, open_token)
    if _arrive_last(arrivals, place, parts):
        winner = _join_parts(
            part_chance,
            part_token,
            logits,
            own_seen,
            penalties,
            top,
            temperature,
            key,
            vocab,
            parts,
        )
        candidate = _join_parts(
            part_chance + parts,
            part_token + parts,
            logits,
            own_seen,
            penalties,
            top,
            temperature,
            key,
            vocab,
            parts,
        )
        sure_value = _find_value(
            winner, winner < vocab, logits, own_seen, penalties, top, temperature, key
        )
        rival = _find_value(
            candidate, candidate < vocab, logits, own_seen, penalties, top, temperature, key
        )
        if rival > sure_value:
            count_before = tl.load(plan + 4)
            mass_before_low = tl.load(plan + 6)
            num = tl.load(num_listed + place, cache_modifier=".cg")
            is_listed = num <= MOST_LISTED
            length = tl.where(is_listed, num, vocab)
            total = tl.load(plan + 7)
            if both:
                total = _weigh_kept(
                    logits,
                    own_seen,
                    penalties,
                    listed,
                    is_listed,
                    length,
                    top,
                    temperature,
                    top_k,
                    edge,
                    count_before,
                    tl.load(plan + 5),
                )
            limit = top_p * total.to(tl.float64)
            while rival > sure_value:
                _, own_score = _load_scores(
                    logits, own_seen, penalties, candidate, candidate < vocab
                )
                rank = _make_rank(_make_order(own_score), candidate)
                is_edge = _find_bin(_shift_scores(own_score, top, temperature)) == edge
                count = count_before
                mass_above = mass_before_low
                best = tl.full((BLOCK,), float("-inf"), tl.float64)
                best_token = tl.full((BLOCK,), _NO_ID, tl.int32)
                for begin in range(0, length, BLOCK):
                    edge_token, there, order, edge_shifted, edge_bin = _read_edge(
                        logits,
                        own_seen,
                        penalties,
                        listed,
                        is_listed,
                        begin,
                        length,
                        top,
                        temperature,
                    )
                    above = there & (_make_rank(order, edge_token) > rank)
                    count += tl.sum((above & (edge_bin == edge)).to(tl.int64), axis=0)
                    above = above & (edge_bin >= low) & (edge_bin <= high)
                    mass = tl.where(above, _find_mass(edge_shifted), 0)
                    mass_above += tl.sum(mass, axis=0)
                    next_value = edge_shifted + _draw_gumbel(key, edge_token)
                    if min_p > 0:
                        likely = _reach_share(edge_shifted, min_p)
                        next_value = tl.where(likely, next_value, float("-inf"))
                    better = above & (next_value > best)
                    best = tl.where(better, next_value, best)
                    best_token = tl.where(better, edge_token, best_token)
                kept = (count < top_k) | (is_edge == 0)
                kept = kept & ((mass_above.to(tl.float64) < limit) | (top_p >= 1))
                winner = tl.where(kept, candidate, winner)
                rival, next_candidate = _find_best(best, best_token)
                # a kept candidate ends the loop
                rival = tl.where(kept, sure_value, rival)
                candidate = tl.where(kept, candidate, next_candidate)
        # the best token is always kept; checked again, as a wrong id would write out of bounds
        winner = tl.where(winner < vocab, winner, find_ranked(best_rank).to(tl.int32))
        logprob = _find_logprob(
            logits,
            block_top + place * blocks,
            block_sum + place * blocks,
            winner,
            vocab,
            block_blocks,
        )
        _finish(
            place,
            row,
            winner,
            logprob,
            step,
            counts,
            tokens,
            seen,
            out_token,
            out_logprob,
            num_rows,
            vocab,
        )
        tl.store(num_listed + place, 0)
        tl.store(arrivals + place, 0)


class DrawState:
    """The sampling state of every cache row, on the device; created once per engine."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device | str) -> None:
        if not 0 < vocab_size <= 2**22:
            raise ValueError(
                f"a vocabulary of {vocab_size} tokens does not fit: the sums of top_p have room "
                f"for 1 to {2**22}"
            )
        self.num_rows, self.vocab_size = num_rows, vocab_size
        self.shares = torch.ones(6, num_rows, device=device, dtype=torch.float64)
        """temperature, top_p, min_p, and penalties of repetition, frequency and presence"""
        self.counts = torch.zeros(3, num_rows, device=device, dtype=torch.int64)
        """top_k, seed, step: the index of the new token in its sequence"""
        # greedy without filters by default
        self.shares[0] = 0
        self.shares[2] = 0
        self.shares[4:] = 0
        self.tokens = torch.zeros(num_rows, device=device, dtype=torch.int64)
        """the newest token of each row"""
        self.seen: Tensor | None = None
        """int32 [rows, V]: occurrences of tokens that are penalised; see `allocate_seen`"""

    def allocate_seen(self) -> Tensor:
        """Return each row's occurrences of tokens; allocated at the first call, all 0.

        They are twice the times that a token was generated, plus 1 if it is in the prompt.

        Penalties take effect from then on. Graphs captured before ignore them.
        """
        if self.seen is None:
            shape = (self.num_rows, self.vocab_size)
            self.seen = torch.zeros(shape, device=self.tokens.device, dtype=torch.int32)
        return self.seen


class Drawer:
    """Draws the tokens of steps of up to `max_places` places; suitable for capture.

    It keeps no state between calls except counters that every call resets to 0, so captures may
    share it as long as they do not run concurrently.
    """

    def __init__(self, state: DrawState, max_places: int) -> None:
        self.state, self.max_places = state, max_places
        device = state.tokens.device
        self.num_blocks = triton.cdiv(state.vocab_size, BLOCK.value)

        def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(max_places, *shape, device=device, dtype=dtype)

        most_parts = max(
            choose_parts(num_places, self.num_blocks) * num_places
            for num_places in range(1, max_places + 1)
        )
        self.block_rank = make(self.num_blocks, dtype=torch.int64)
        self.block_top, self.block_sum = (make(self.num_blocks) for _ in range(2))
        # for each place: the best token certain to be kept, then the best at the edge
        chances = torch.zeros(2 * most_parts, device=device)
        self.part_chance, self.part_token = chances, chances.to(torch.int32)
        self.part_mass = torch.zeros(most_parts, device=device, dtype=torch.int64)
        self.bin_count = make(BINS.value, dtype=torch.int32)
        self.bin_mass = make(BINS.value, dtype=torch.int64)
        self.listed = make(MOST_LISTED.value, dtype=torch.int32)
        self.num_listed, self.arrivals = (make(dtype=torch.int32) for _ in range(2))
        self.plan = make(PLAN.value, dtype=torch.int64)

    def __call__(
        self,
        logits: Float[Tensor, "B V"],
        row: Int[Tensor, " B"],
        out_token: Int[Tensor, " B"],
        out_logprob: Float[Tensor, " B"],
        *,
        plain: bool,
        filtered: bool = True,
    ) -> None:
        """Draw a token for each place's cache row, and store it in the state.

        A place of row -1 gets token 0 and log-probability 0. No row may occur twice. `plain` is a
        shortcut for steps in which every row is greedy, without penalties or log-probabilities,
        which are then 0. `filtered=False` skips a kernel; use it if no row has top_k or top_p.
        """
        state, num_places = self.state, logits.shape[0]
        if num_places == 0:
            return
        assert num_places <= self.max_places
        assert logits.shape[1] == state.vocab_size
        assert logits.stride(1) == 1 or state.vocab_size == 1
        assert all(t.is_contiguous() for t in (row, out_token, out_logprob))
        assert row.dtype == out_token.dtype == torch.int64
        assert out_logprob.dtype == torch.float32
        parts = choose_parts(num_places, self.num_blocks)
        grid = (parts, num_places)
        given = (logits, row, state.shares, state.counts, state.tokens, state.seen)
        sums = (self.block_rank, self.block_top, self.block_sum)
        best = (self.part_chance, self.part_token)
        bins = (self.part_mass, self.bin_count, self.bin_mass)
        edge = (self.listed, self.num_listed)
        rest = (
            self.arrivals,
            out_token,
            out_logprob,
            logits.stride(0),
            state.num_rows,
            state.vocab_size,
            parts,
            triton.next_power_of_2(self.num_blocks),
        )
        _rank_tokens[grid](*given, *sums, *rest, plain=plain, num_warps=4)
        if not plain:
            _weigh[grid](*given, *sums, *best, *bins, self.plan, *rest, num_warps=8)
            if filtered:
                _sift[grid](*given, *sums, *best, *edge, self.plan, *rest, num_warps=8)


def choose_parts(num_places: int, num_blocks: int) -> int:
    """Number of programs per row, a power of two; with few rows there are more.

    Only two sizes, because each is compiled.
    """
    return min(32 if num_places <= 16 else 8, triton.next_power_of_2(num_blocks))
