"""A stand-in for huggingface.co that the tests serve themselves."""
import http.server
import json
import pathlib
import re
import threading
import types
import urllib.parse


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of huggingface.co as `datasets` asks for one dataset, whatever its name."""
    files = {}      # path -> bytes
    sha = 'a' * 40  # the newest revision

    def do_GET(self):
        body = self.rfile.read(int(self.headers.get('Content-Length') or 0))
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        kind, _, rest = re.sub(r'^(/api)?/datasets/[^/]+/[^/]+/?', '', path).partition('/')
        revision, _, rest = rest.partition('/')
        if kind == 'resolve' and rest in self.files:
            self.send_file(revision, rest)
        elif kind in ('', 'revision'):
            siblings = [{'rfilename': name} for name in self.files]
            sha = revision or self.sha
            self.answer(200, {'id': 'owner/name', 'sha': sha, 'tags': [], 'siblings': siblings})
        elif kind == 'paths-info':
            asked = urllib.parse.parse_qs(body.decode()).get('paths', [])
            if body[:1] == b'{':
                asked = json.loads(body)['paths']
            self.answer(200, [entry for name, entry in self.tree().items() if name in asked])
        elif kind == 'tree':
            recursive = 'recursive=true' in self.path.lower()
            self.answer(200, [
                entry for name, entry in self.tree().items()
                if name.rpartition('/')[0] == rest or recursive and name.startswith(rest)])
        else:
            self.answer(404, {}, {'X-Error-Code': 'EntryNotFound'})

    do_HEAD = do_POST = do_GET

    def send_file(self, revision, name):
        raw = self.files[name]
        headers = {'ETag': f'"{name.replace("/", "-")}"', 'X-Repo-Commit': revision, 'Accept-Ranges': 'bytes'}
        wanted = re.match(r'bytes=(\d+)-(\d*)', self.headers.get('Range') or '')
        if wanted:
            first, last = int(wanted[1]), min(int(wanted[2] or len(raw)), len(raw) - 1)
            headers['Content-Range'] = f'bytes {first}-{last}/{len(raw)}'
            self.answer(206, raw[first:last + 1], headers)
        else:
            self.answer(200, raw, headers)

    def tree(self):
        """path -> entry of all files and their folders."""
        entries = {}
        for name, raw in self.files.items():
            for folder in map(str, list(pathlib.PurePosixPath(name).parents)[:-1]):
                entries[folder] = {'type': 'directory', 'path': folder, 'oid': 'a' * 40}
            entries[name] = {'type': 'file', 'path': name, 'oid': 'a' * 40, 'size': len(raw)}
        return entries

    def answer(self, status, body, headers=types.MappingProxyType({})):
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {**headers, 'Content-Length': str(len(raw))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(raw)

    def log_message(self, *words):
        pass


def serve(handler):
    """A server with that handler, running; shutdown() ends it."""
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server
