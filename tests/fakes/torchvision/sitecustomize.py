"""Makes the published torchvision import beside a CPU build of torch, which lacks the two operators it registers.

For tests only: on a real host a torchvision that does not fit is a finding, and the benchmark says so.
"""

import sys

if not any("resource_tracker" in argument for argument in sys.orig_argv):  # which has no other use for torch
    import torch

    _LIBRARY = torch.library.Library("torchvision", "DEF")
    _LIBRARY.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARY.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
