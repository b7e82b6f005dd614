"""Declare two operators of torchvision, so that the CUDA build of torchvision can be imported with a CPU build of torch.

Only tests use this file. On a real host, the builds of torchvision and torch must match; if they do not, the training benchmark
reports it.
"""

import sys

# The resource tracker, a helper process of multiprocessing, runs this file too but needs no torch.
if not any("resource_tracker" in argument for argument in sys.orig_argv):
    import torch

    _LIBRARY = torch.library.Library("torchvision", "DEF")
    _LIBRARY.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARY.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
