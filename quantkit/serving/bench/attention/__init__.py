"""Time and memory of attention implementations at growing lengths, and the kernel that each one ran."""
