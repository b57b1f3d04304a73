"""The speed that tests take for this machine's: that of one core with AMX, in bfloat16."""

from quantkit.capacity.speed import Speed

SPEED = Speed(
    product=2.5e-12, float32=1.5e-11, moment=1.1e-11, value=1.2e-9, column=7e-5, weight=1.2e-7, byte=8e-11
)
