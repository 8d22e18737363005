"""softmax and log_softmax of any tensor along any dimension, at the speed of memory.

>>> import torch, ndsoftmax
>>> ndsoftmax.softmax(torch.zeros(2, 4), dim=-1)
tensor([[0.2500, 0.2500, 0.2500, 0.2500],
        [0.2500, 0.2500, 0.2500, 0.2500]])
"""

from typing import Any

from ndsoftmax import _C, nn, ops
from ndsoftmax._explain import Explanation, explain
from ndsoftmax._override import disable, enable
from ndsoftmax.functional import log_softmax, masked_log_softmax, masked_softmax, softmax

__all__ = [
    "Explanation",
    "__version__",
    "build_info",
    "disable",
    "enable",
    "explain",
    "log_softmax",
    "masked_log_softmax",
    "masked_softmax",
    "nn",
    "ops",
    "softmax",
]


def build_info() -> dict[str, Any]:
    """What this installation was built with, and what it uses here.

    Returns
    -------
    dict
        ``version`` of ndsoftmax; ``cuda``: whether it has CUDA kernels; ``cuda_version`` of the compiler, or None;
        ``architectures`` the kernels were compiled for; ``cpu_instruction_sets`` that were built, and
        ``cpu_capability``, the one of them in use; ``compiler`` of the C++ parts.

    Examples
    --------
    >>> ndsoftmax.build_info()["cpu_capability"] in ndsoftmax.build_info()["cpu_instruction_sets"]
    True
    """
    return _C.build_info()


__version__ = _C.VERSION
