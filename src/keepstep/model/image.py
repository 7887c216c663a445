"""The image of a process on its way from one agent to the next place of its rank.

One connection to the blob port of the agent that has the process, for one request:

    ImageLook -> ImageFacts                 the process runs on; nothing is changed
    ImagePages -> ImageEnd; from there on raw: what CRIU says to its page server, and hears
    ImagePart -> ImageFile and its bytes, or ImageEnd; the request waits for the ImageGet to come
    ImageGet  -> ImageBegun, then for each file ImageFile and its bytes, then ImageEnd

Pages go while they are dumped, so whoever gets an image opens a line for them first. What the
process had on a GPU goes beside, in parts, if the process can move that itself: it has written them
into files, and is dumped while they travel. So does the memory that the GPU's driver has taken for
its snapshot, in as many parts more.
The process must hold when ImageGet comes. It is left stopped, and stays so until its agent is told
to kill it (the move was committed) or to go on (Abort or Release).
"""

from __future__ import annotations

from typing import Final

from keepstep.model.agent_messages import Host
from keepstep.model.messages import Message

# The same path in every capsule, and nobody else's: a folder for named sockets, and parts in it.
CAPSULE: Final = "/run/keepstep-nest"
PARTS_FOLDER: Final = f"{CAPSULE}/gpu"
PARTS: Final = 8  # each is copied by a thread of its own, and travels on a line of its own


class ImageLook(Message, frozen=True):
    token: str
    rank: int


class ImageGet(Message, frozen=True):
    token: str
    rank: int
    generation: int  # for which it holds; once it was told that this is over, it is not stopped
    seconds_max: float
    gpu: bool  # whoever asks is prepared for a process that has one in use
    parts: bool  # ... and has asked for what the process can move itself


class ImagePages(Message, frozen=True):
    token: str
    rank: int


class ImagePart(Message, frozen=True):
    token: str
    rank: int
    part: int
    seconds_max: float  # until it is there


ImageRequest = ImageLook | ImageGet | ImagePages | ImagePart


class ImageFacts(Message, frozen=True):
    host: Host
    offenders: list[str]  # what cannot be moved, in words
    files: list[tuple[str, int]]  # mapped: they must be there with the same size
    paths: list[str]  # open, or the working directory: they must be there
    image_bytes: int  # about
    gpu: str = ""  # UUID of the one that the process uses; "": none
    gpu_bytes: int = 0
    offloads: bool = False  # it moves those bytes itself: they are not in the image


class ImageBegun(Message, frozen=True):
    pid: int  # as the process knows itself
    control: int  # inode of its control socket
    page: int  # descriptor of its progress page
    log: str  # file that its output goes to
    folders: list[str]  # of named sockets between its processes
    names: list[str]  # of sockets that have one, but none in the file system
    dump_ns: int
    gpu_ns: dict[str, int] = {}  # what its GPU took, by name
    areas: bool = (
        False  # its driver's memory is in parts; it fetches them before the driver restores
    )


class ImageFile(Message, frozen=True):
    name: str
    size: int


class ImageEnd(Message, frozen=True):
    files: int


class ImageRefused(Message, frozen=True):
    error: str


ImageReply = ImageFacts | ImageBegun | ImageFile | ImageEnd | ImageRefused
