"""The format of a lane (csrc/lane/ring.h): byte offsets of its parts."""

from __future__ import annotations

import struct

NO_REGION = 0xFFFFFFFF
STATE, COMPLETED, SUBMITTED, CONSUMED = 64, 128, 256, 320
ENTRIES, COMPLETIONS, SLOT_BYTES, CAPACITY = 4096, 20480, 256, 64
ENTRY = struct.Struct("<QqiIiiff" + "IIQ" * 6 + "5i100x")
COMPLETION = struct.Struct("<QII32s48s128s32x")
DECODE, RETURN_LSE = 1, 2
