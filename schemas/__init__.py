"""The contract that hosts and the control node share: JSON Schemas, and the dataclasses they describe."""

VERSION = "1.0.0"
