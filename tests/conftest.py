"""For every test: a machine that is busy fails none of hypothesis' examples."""

from hypothesis import settings

settings.register_profile("no-clock", deadline=None)
settings.load_profile("no-clock")
