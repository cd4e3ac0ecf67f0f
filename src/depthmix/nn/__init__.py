"""The network: dense blocks, routers, experts, and the stack that joins them.

One shape legend for the whole package. A tensor's suffix names its dimensions:

    B  batch rows          D  model width          E  experts
    T  tokens in a row     N  query heads          V  vocabulary
    K  tokens kept         G  key/value heads
    S  cache slots         H  head width
    R  (token, expert)     F  MLP width
       pairs

Every token carries a `Place`: its rotary phase, its position, its document, and whether it is a
token at all. Attention and routing read nothing else about order, so a gathered token keeps its
true place and decoding is the same code as training.
"""

from depthmix.nn.attention import Place
from depthmix.nn.cache import Cache
from depthmix.nn.depth import MixtureOfDepths
from depthmix.nn.experts import ExpertRouting
from depthmix.nn.routing import Routing
from depthmix.nn.transformer import Output, Transformer

__all__ = [
    "Cache",
    "ExpertRouting",
    "MixtureOfDepths",
    "Output",
    "Place",
    "Routing",
    "Transformer",
]
