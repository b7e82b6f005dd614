"""Declare two operators without which the published torchvision cannot be imported with a CPU build of torch.

Only tests use this file: on a real host, torchvision must match torch, and the benchmark reports a mismatch.
"""

import sys

if not any("resource_tracker" in argument for argument in sys.orig_argv):  # the resource tracker needs no torch
    import torch

    _LIBRARY = torch.library.Library("torchvision", "DEF")
    _LIBRARY.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARY.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
