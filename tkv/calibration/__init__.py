"""Static scales of a cache, from the keys and values that a model makes."""

from tkv.calibration.calibrator import Calibrator, calibrate
from tkv.calibration.checkpoint import load_scales, save_scales

__all__ = ["Calibrator", "calibrate", "load_scales", "save_scales"]
