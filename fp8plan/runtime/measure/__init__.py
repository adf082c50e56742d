"""The measurements that `fp8plan calibrate` runs."""
