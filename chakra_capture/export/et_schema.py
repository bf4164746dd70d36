"""Chakra's messages and enumerations.

They live in a descriptor pool of their own, so a process may also import the official package, whose messages have
the same names.
"""

from enum import IntEnum
from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from chakra_capture.export._et_def import DESCRIPTORS


class NodeType(IntEnum):
    """What a node stands for."""

    INVALID_NODE = 0
    METADATA_NODE = 1
    MEM_LOAD_NODE = 2
    MEM_STORE_NODE = 3
    COMP_NODE = 4
    COMM_SEND_NODE = 5
    COMM_RECV_NODE = 6
    COMM_COLL_NODE = 7


class CollectiveType(IntEnum):
    """Attribute ``comm_type`` of a collective."""

    ALL_REDUCE = 0
    REDUCE = 1
    ALL_GATHER = 2
    GATHER = 3
    SCATTER = 4
    BROADCAST = 5
    ALL_TO_ALL = 6
    REDUCE_SCATTER = 7
    REDUCE_SCATTER_BLOCK = 8
    BARRIER = 9


def node_type_name(number: int) -> str:
    """Name of a node type, or its number where Chakra has none."""
    return NodeType(number).name if number in NodeType._value2member_map_ else f"type {number}"


def collective_name(number: int) -> str:
    """Name of a collective type, or its number where Chakra has none."""
    return CollectiveType(number).name if number in CollectiveType._value2member_map_ else f"type {number}"


@cache
def message(name: str) -> Any:
    """Class of one of Chakra's messages, such as ``Node``."""
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"ChakraProtoMsg.{name}"))


@cache
def _pool() -> Any:
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(DESCRIPTORS).file:
        pool.Add(file)
    return pool
