"""Which direction is better, by an observation's unit and the last part of its name."""

RATES = frozenset({"B/s", "FLOP/s", "FLOP/J", "FLOP/cycle", "images/s", "tokens/s"})
"""Units where more is better."""
HIGH = frozenset(
    {"accuracy", "mfu", "tested_share", "hidden_share", "sufficiency", "generation", "width", "active_links"}
)
"""Last parts of observation names where more is better."""
LOW = frozenset(
    {
        "latency", "graph_latency", "step_time", "save_time", "restore_time", "duration", "slowdown", "loss", "loss_ratio",
        "throttled_share", "replays", "failed", "pending", "last_seen", "temperature",
    }
)  # fmt: skip
"""Last parts of observation names where less is better."""
NEVER = frozenset({"wrong_elements", "wrong_words", "wrong_products", "mismatches", "uncorrectable_volatile"})
"""Last parts of observation names that must be zero."""
