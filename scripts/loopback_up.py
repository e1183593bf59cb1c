#!/usr/bin/env python3
"""Brings the loopback interface up, then becomes the command that follows: `ip link set lo up` without iproute2."""

import fcntl
import os
import socket
import struct
import sys

SIOCGIFFLAGS = 0x8913
SIOCSIFFLAGS = 0x8914
IFF_UP = 1
INTERFACE_REQUEST = "16sH14x"  # struct ifreq: the name, then the flags

with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
    request = fcntl.ioctl(control, SIOCGIFFLAGS, struct.pack(INTERFACE_REQUEST, b"lo", 0))
    name, flags = struct.unpack(INTERFACE_REQUEST, request)
    fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack(INTERFACE_REQUEST, name, flags | IFF_UP))

os.execvp(sys.argv[1], sys.argv[1:])
