"""The computer: devices, memory limits, and several processes."""
