"""What tkv knows about GPUs and which kernel configuration suits them. Importing it needs no GPU."""

from tkv.tune.arch import ARCHS, Arch, Part, arch, arch_of_device, configs_dir, parts

__all__ = ["ARCHS", "Arch", "Part", "arch", "arch_of_device", "configs_dir", "parts"]
