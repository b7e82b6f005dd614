"""Which direction is better, by an observation's unit and the last part of its name."""

RATE_UNITS = frozenset({"B/s", "FLOP/s", "FLOP/J", "FLOP/cycle", "images/s", "tokens/s", "1/s", "transfers/s"})
"""Units where more is better."""
HIGHER_IS_BETTER = frozenset(
    {
        "accuracy", "mfu", "tested_share", "hidden_share", "sufficiency", "generation", "width", "active_links", "work",
        "work_share", "kept_share", "amplitude",
    }
)  # fmt: skip
"""Last parts of observation names where more is better."""
LOWER_IS_BETTER = frozenset(
    {
        "latency", "graph_latency", "step_time", "save_time", "restore_time", "duration", "slowdown", "loss", "loss_ratio",
        "throttled_share", "first_token", "token_interval", "deviation", "replays", "failed", "pending", "last_seen",
        "temperature",
    }
)  # fmt: skip
"""Last parts of observation names where less is better."""
MUST_BE_ZERO = frozenset(
    {
        "wrong_elements",
        "wrong_words",
        "wrong_blocks",
        "wrong_bytes",
        "misread_bytes",
        "wrong_products",
        "mismatches",
        "wrong_peer_copies",
        "wrong_tokens",
        "wrong_losses",
        "wrong_parameters",
        "uncorrectable_volatile",
    }
)
"""Last parts of the names of observations whose value must be zero."""
