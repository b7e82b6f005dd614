"""Let the published torchvision be imported with a CPU build of torch, which lacks two of its operators.

For tests only: on a real host, torchvision must match torch, and the benchmark reports if it does not.
"""

import sys

if not any("resource_tracker" in argument for argument in sys.orig_argv):  # the resource tracker needs no torch
    import torch

    _LIBRARY = torch.library.Library("torchvision", "DEF")
    _LIBRARY.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARY.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
