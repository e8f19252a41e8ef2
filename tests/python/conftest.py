"""Makes the package of this tree importable where nobody installed one or set PYTHONPATH, for the ranks' processes too."""

import importlib.util
import os
import pathlib
import sys

BUILT = pathlib.Path(__file__).resolve().parents[2] / "build" / "python"

if importlib.util.find_spec("ragged_fsdp") is None and BUILT.is_dir():
    sys.path.insert(0, str(BUILT))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(BUILT), os.environ.get("PYTHONPATH")]))
