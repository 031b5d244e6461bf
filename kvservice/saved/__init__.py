"""Sessions on disk: files that outlive the daemon and the machine's memory.

sessions    SessionFiles: writes and reads the file of a session; blocks between a device and a file
files       SavedFiles: the folder, its limit and its expired files; files past the page cache
format      header and manifest
"""

from kvservice.saved.files import SavedFiles
from kvservice.saved.format import SessionValues
from kvservice.saved.sessions import OpenedSession, SessionFiles

__all__ = ["OpenedSession", "SavedFiles", "SessionFiles", "SessionValues"]
