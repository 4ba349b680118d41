"""Last import of the ranks' fork server: what it has made by then is looked through once, and not by
every rank, for which each object looked at would be a page copied.
"""

from tests.executor.support.recording.recording_backend import know_world

know_world()
