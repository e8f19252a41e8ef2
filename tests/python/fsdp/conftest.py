"""Makes the helpers of these tests importable by name, here and in the ranks' processes; nothing else."""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [_HERE, os.path.dirname(_HERE)]
