"""The mismatch of each precision, measured on this GPU with this model."""
