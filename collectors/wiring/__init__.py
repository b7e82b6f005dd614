"""The switch port at the other end of each network port."""

from collectors.wiring.collector import WiringCollector

__all__ = ["WiringCollector"]
