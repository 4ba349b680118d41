"""Bearer tokens, in a file that may be replaced while a process runs.

One token a line; empty lines and those that begin with # do not count. Whoever checks takes any of
them, whoever calls sends the first. To replace a token, add the new one where it is checked, then
change it where it is sent, then remove the old one. A token's text is in no log and no error: a
bad line is named by its number.
"""

import hashlib
import hmac
import re
from pathlib import Path

from protos.transport.watched import Watched

RELOAD_S = 1.0  # a file is looked at so often at most, since every call asks
MIN_LENGTH = 16
SCHEME = "Bearer "


def read_tokens(path: Path) -> tuple[str, ...]:
    """Returns a file's tokens.

    Raises:
        OSError: It cannot be read.
        ValueError: It has none, or a line that is none.
    """
    tokens = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        token = line.strip().decode("ascii", errors="replace")
        if not token or token.startswith("#"):
            continue
        if re.fullmatch(r"[!-~]+", token) is None:
            raise ValueError(f"{path}, line {number}: a token has visible ASCII characters only")
        if len(token) < MIN_LENGTH:
            raise ValueError(
                f"{path}, line {number}: a token of {len(token)} characters can be guessed; need "
                f"{MIN_LENGTH}, such as those of: openssl rand -hex 32"
            )
        tokens.append(token)
    if not tokens:
        raise ValueError(f"{path} has no token: write one on each line")
    return tuple(tokens)


class AcceptedTokens:
    """The tokens that a port takes. It keeps their hashes only.

    Raises:
        OSError: The file cannot be read.
        ValueError: It makes no sense.
    """

    def __init__(self, path: Path) -> None:
        self._hashes = Watched(
            "auth_tokens",
            lambda: tuple(_hash(token) for token in read_tokens(path)),
            lambda hashes: hashes,
            interval_s=RELOAD_S,
        )

    def accepts(self, token: str) -> bool:
        """Returns whether this is one of them, in a time that tells nothing about how near it is."""
        given, is_one = _hash(token), False
        for known in self._hashes.value():
            is_one |= hmac.compare_digest(given, known)
        return is_one


class SentToken:
    """The token that a caller sends: the first of a file.

    Raises:
        OSError: The file cannot be read.
        ValueError: It makes no sense.
    """

    def __init__(self, path: Path) -> None:
        self._token = Watched(
            "token", lambda: read_tokens(path)[0], lambda token: token, interval_s=RELOAD_S
        )

    def __call__(self) -> str:
        return self._token.value()


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
