"""What all tests share."""

from hypothesis import settings

# How long an example takes says nothing on a machine whose cores others use as well.
settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")
