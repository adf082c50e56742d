"""Reads each config.json below a folder as the installed vLLM does, and prints what it makes of it, or the error.

python -m benchmarks.families.read_configs benchmarks/families
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path


def main() -> None:
    from vllm.config import ModelConfig

    print(json.dumps({name: version(name) for name in ("torch", "transformers")}))
    for file in sorted(Path(sys.argv[1]).glob("*/config.json")):
        print(json.dumps({"config": file.parent.name} | read(file, ModelConfig)), flush=True)


def read(file: Path, model_config: type) -> dict[str, object]:
    """Facts that vLLM takes from a config.json, without the fields that start with an underscore."""
    config = {name: value for name, value in json.loads(file.read_text()).items() if not name.startswith("_")}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        try:
            found = model_config(model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=8192)
        except Exception as error:  # whatever it is, it is the answer
            return {"error": f"{type(error).__name__}: {error}"[:1500]}
        return {
            "class": type(found.hf_config).__name__,
            "architectures": found.architectures,
            "is_hybrid": found.is_hybrid,
            "is_moe": found.is_moe,
            "use_mla": found.use_mla,
            "head_size": found.get_head_size(),
            "layers": found.get_total_num_hidden_layers() if hasattr(found, "get_total_num_hidden_layers") else None,
        }


if __name__ == "__main__":
    main()
