"""What a device and its links can do: the profiles that costs and predictions are made with."""

from .profile import Hardware, load_hardware, profile_names, profile_text

__all__ = ["Hardware", "load_hardware", "profile_names", "profile_text"]
