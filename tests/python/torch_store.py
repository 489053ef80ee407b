"""Runs PyTorch's TCPStore as a server for Fusewire's client, or as a client of Fusewire's server.
Commands: `serve [libuv]`, `master PORT`, `client PORT`, `probe`."""

import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

NEW = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 1)
LARGE = bytes((i * 7 + (i >> 8)) & 255 for i in range(1 << 20))


def connect(port, seconds=20):
    return dist.TCPStore(
        "127.0.0.1", port, None, False, timedelta(seconds=seconds), wait_for_workers=False
    )


def serve(options):
    store = dist.TCPStore(
        "127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False, **options
    )
    print(store.port, flush=True)
    sys.stdin.readline()  # wait until the client has written its keys
    assert store.get("from_fusewire") == b"\0\xff binary", store.get("from_fusewire")
    assert store.get("large") == LARGE
    assert store.add("counter", 1) == 43
    store.set("from_torch", LARGE)
    print("ok", flush=True)
    sys.stdin.readline()  # wait until the client is done


def master(port):
    # The constructor returns once two clients have joined: this client and a client of Fusewire.
    store = dist.TCPStore("127.0.0.1", port, 2, True, timedelta(seconds=20))
    print("ok", flush=True)
    sys.stdin.readline()
    assert store.get("from_fusewire") == b"1"


def refused(call):
    try:
        call()
    except Exception:  # the type differs between versions
        return True
    return False


def client(port):
    store = connect(port)
    store.set("k", b"\0\xff binary")
    assert store.get("k") == b"\0\xff binary"
    store.set("large", LARGE)
    assert store.get("large") == LARGE
    store.set("empty", b"")
    assert store.get("empty") == b""
    assert store.add("counter", 5) == 5
    assert store.add("counter", -12) == -7
    assert store.get("counter") == b"-7"
    assert store.compare_set("cas", "old", "new") == b"old"
    assert store.compare_set("cas", "", "first") == b"first"
    assert store.compare_set("cas", "wrong", "second") == b"first"
    assert store.compare_set("cas", "first", "second") == b"second"
    before = store.num_keys()
    assert store.delete_key("cas") and not store.delete_key("cas")
    assert store.num_keys() == before - 1
    store.wait(["k", "large"])
    # The wait times out. The same client must still work afterwards.
    assert refused(lambda: store.wait(["never"], timedelta(milliseconds=200)))
    assert store.get("counter") == b"-7"
    # A waiting client must not block another client.
    waiter = threading.Thread(target=lambda: connect(port).wait(["late"]))
    waiter.start()
    store.set("late", "x")
    waiter.join()
    # Several clients use the store concurrently.
    def count():
        own = connect(port)
        for _ in range(50):
            own.add("many", 1)
    threads = [threading.Thread(target=count) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert store.add("many", 0) == 200
    if NEW:
        assert store.check(["k"]) and not store.check(["k", "never"])
        store.append("k", b"+")
        assert store.get("k") == b"\0\xff binary+"
        store.multi_set(["m1", "m2"], [b"1", b"\0"])
        assert store.multi_get(["m2", "m1"]) == [b"\0", b"1"]
        if hasattr(store, "queue_push"):
            store.queue_push("q", b"a")
            store.queue_push("q", b"b")
            assert store.queue_len("q") == 2
            assert store.queue_pop("q") == b"a" and store.queue_pop("q") == b"b"
            assert refused(lambda: store.queue_pop("q", False))
        if hasattr(store, "list_keys"):
            keys = store.list_keys()
            assert {"k", "m1", "m2"} <= set(keys) and "cas" not in keys, keys
        if hasattr(store, "barrier"):
            join = lambda: connect(port).barrier("b", 3)
            others = [threading.Thread(target=join) for _ in range(2)]
            [other.start() for other in others]
            store.barrier("b", 3)
            [other.join() for other in others]
    assert store.get("from_rust") == LARGE  # waits until Fusewire has written the key
    store.set("done", b"\0done")
    print("ok", torch.__version__, flush=True)


if sys.argv[1] == "serve":
    # Without the argument, PyTorch selects the default of its version.
    serve({"use_libuv": sys.argv[2] == "libuv"} if len(sys.argv) > 2 else {})
elif sys.argv[1] == "master":
    master(int(sys.argv[2]))
elif sys.argv[1] == "client":
    client(int(sys.argv[2]))
else:
    print(torch.__version__, "new" if NEW else "old", flush=True)
