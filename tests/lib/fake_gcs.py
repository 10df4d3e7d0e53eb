"""Google Cloud Storage, as far as gcsfs and TensorStore ask for it: objects in memory, with generations.

An object is put whole, is there for everybody at once, and gets another generation each time; conditions on
generations hold. The service promises that, and a run's folder there may rely on nothing else.
"""

import contextlib
import json
import re
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_ASKED = re.compile(r"(/download|/upload|/resumable)?/storage/v1/b/([^/]+)(?:/o(?:/(.*))?)?")


class FakeGCS(ThreadingHTTPServer):
    """Serves buckets of any name, on a port of this machine, until the process ends.

    Attributes:
      objects: (bucket, name) -> (generation, content).
      on_put: called with the name of each object, before it is there; a PermissionError of it forbids that.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects, self.lock, self.on_put = {}, threading.RLock(), lambda name: None
        self._number = 0
        threading.Thread(target=self.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{self.server_port}"
        # With which processes find it.
        self.environ = {"STORAGE_EMULATOR_HOST": url, "TENSORSTORE_GCS_HTTP_URL": url}
        self.environ |= {"FSSPEC_GCS_TOKEN": "anon", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}

    def names(self, prefix=""):
        """Of objects that begin so, in all buckets."""
        with self.lock:
            return sorted(name for _, name in self.objects if name.startswith(prefix))

    def put(self, key, content):
        """What is said of the object that is there now."""
        with self.lock:
            self._number += 1
            self.objects[key] = self._number, content
            return self.describe(key)

    def describe(self, key):
        generation, content = self.objects[key]
        time = "2026-01-01T00:00:00.000Z"
        told = {"bucket": key[0], "name": key[1], "size": len(content), "generation": generation}
        told |= {"metageneration": 1, "timeCreated": time, "updated": time}
        return {name: str(value) for name, value in told.items()}

    def handle_error(self, *_):
        """Who was killed hears nothing."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def _serve(self):
        url = urllib.parse.urlsplit(self.path)
        query = {n: v[-1] for n, v in urllib.parse.parse_qs(url.query, True).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        service, bucket, name = _ASKED.fullmatch(url.path).groups()
        key, put = (bucket, urllib.parse.unquote(name or "") or query.get("name")), None
        if service == "/upload" and query["uploadType"] == "resumable":
            at = f"{urllib.parse.quote(key[1], safe='')}"
            at = f"http://{self.headers['Host']}/resumable/storage/v1/b/{bucket}/o/{at}"
            return self._answer(200, b"{}", Location=at)
        if service == "/upload" and query["uploadType"] == "multipart":
            _, told, content = body.split(b"\n\n", 2)
            key = bucket, json.loads(told.split(b"\n")[0])["name"]
            put = content[: content.rindex(b"\n--")]
        elif service in ("/upload", "/resumable"):
            assert self.headers.get("Content-Range", "bytes 0-").startswith("bytes 0-")  # one part
            put = body
        if put is not None:
            try:
                self.server.on_put(key[1])
            except PermissionError:
                return self._answer(403)
        with self.server.lock:
            generation, content = self.server.objects.get(key, (0, None))
            if query.get("ifGenerationMatch", str(generation)) != str(generation):
                return self._answer(412)
            if query.get("ifGenerationNotMatch") == str(generation):
                return self._answer(304)
            if put is not None:
                return self._answer(200, self.server.put(key, put))
            if moved := re.fullmatch(r"(.+)/(moveTo|rewriteTo/b/[^/]+)/o/(.+)", name or ""):
                name, new = map(urllib.parse.unquote, moved.group(1, 3))  # in one bucket
                _, content = self.server.objects.get((bucket, name), (0, None))
                if content is None:
                    return self._answer(404)
                told = {**self.server.put((bucket, new), content), "done": True}
                if moved[2] == "moveTo":
                    del self.server.objects[bucket, name]
                return self._answer(200, told)
            if key[1] is None:
                return self._answer(200, self._list(bucket, query))
            if content is None:
                return self._answer(404)
            if self.command == "DELETE":
                del self.server.objects[key]
                return self._answer(204)
            if query.get("alt") != "media" and service != "/download":
                return self._answer(200, self.server.describe(key))
        told = {"x-goog-generation": str(generation), "ETag": f'"{generation}"'}
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            begin, end = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1)
            if begin >= len(content):
                return self._answer(416, **told)
            told["Content-Range"] = f"bytes {begin}-{end}/{len(content)}"
            return self._answer(206, content[begin : end + 1], **told)
        return self._answer(200, content, **told)

    do_GET = do_POST = do_PUT = do_DELETE = _serve

    def _list(self, bucket, query):
        prefix, items, prefixes = query.get("prefix", ""), [], set()
        for key in sorted(self.server.objects):
            if key[0] != bucket or not key[1].startswith(prefix):
                continue
            if not query.get("startOffset", "") <= key[1] < query.get("endOffset", "\U0010ffff"):
                continue
            inner, cut, _ = key[1][len(prefix) :].partition(query.get("delimiter") or "\0")
            if cut:
                prefixes.add(prefix + inner + cut)
            else:
                items.append(self.server.describe(key))
        return {"items": items, "prefixes": sorted(prefixes)}

    def _answer(self, status, content=b"", **headers):
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        with contextlib.suppress(ConnectionError):
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
