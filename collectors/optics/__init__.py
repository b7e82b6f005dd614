"""Modules (transceivers, active and passive cables) and the physical layer of Ethernet and InfiniBand ports."""

from collectors.optics.collector import OpticsCollector

__all__ = ["OpticsCollector"]
