"""A model's tokenizer as one zip file, for a gateway that has no copy of the model."""

import io
import zipfile
from pathlib import Path

TOKENIZER_FILE = "tokenizer.json"
# What stands beside tokenizer.json in a checkpoint and says how text is made and read.
COMPANIONS = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer_config.json",
    "vocab.json",
)
_TIME = (1980, 1, 1, 0, 0, 0)  # the same for all, so that equal files make an equal archive


def zip_tokenizer(tokenizer_file: Path) -> bytes:
    """Returns an archive of the tokenizer and of what stands beside it.

    Args:
        tokenizer_file: The tokenizer.json, whatever its name; in the archive, that is its name.

    Raises:
        OSError: It cannot be read.
    """
    paths = {name: tokenizer_file.parent / name for name in COMPANIONS}
    paths = {name: path for name, path in paths.items() if path.is_file()}
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        for name, path in {TOKENIZER_FILE: tokenizer_file, **paths}.items():
            entry = zipfile.ZipInfo(name, date_time=_TIME)
            entry.compress_type = zipfile.ZIP_DEFLATED
            file.writestr(entry, path.read_bytes())
    return archive.getvalue()
