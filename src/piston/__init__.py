"""Piston trains π0 and π0.5 on LeRobot data in PyTorch, equal to openpi's JAX reference."""

__version__ = "0.1.0"
