"""What the machine at hand has: GPUs and their memory as NVML counts it, packages, versions."""
