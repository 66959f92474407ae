"""An emulated API server of Kubernetes: kmock, with versions of objects, conflicts, tokens and the rights of Roles.

It serves by TLS on an address of a network namespace. There is no etcd and no validation: `tests/launch` checks
manifests against the published schemas.
"""

import asyncio
import json
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp.web
import attrs
import kmock
from kmock._internal import rendering

from benchmarks.namespaces import enter
from tests.certificates import Authority

PORT = 6443
ADMIN = "the token of the administrator"
NAMESPACE = "ml"
KUBELET = "emulated/kubelet"  # the finalizer of a pod: it is there until its processes have ended
_PLURALS = {
    "ServiceAccount": "v1/serviceaccounts",
    "Pod": "v1/pods",
    "Node": "v1/nodes",
    "Lease": "coordination.k8s.io/v1/leases",
    "Role": "rbac.authorization.k8s.io/v1/roles",
    "RoleBinding": "rbac.authorization.k8s.io/v1/rolebindings",
    "JobSet": "jobset.x-k8s.io/v1alpha2/jobsets",
}
_VERBS = {"GET": "get", "PUT": "update", "PATCH": "patch", "DELETE": "delete", "POST": "create"}


@attrs.define(kw_only=True)
class Emulator(kmock.KubernetesEmulator):
    """kmock, and what it leaves out."""

    tokens: dict[str, str] = attrs.field(factory=dict)  # of service accounts, by token
    asked: list[tuple[str, str, str]] = attrs.field(factory=list)  # service account, verb and path of each request
    is_down: bool = False
    _versions: int = 0

    async def _handle(self, request: rendering.Request) -> aiohttp.web.StreamResponse:
        if self.is_down:
            return _refusal(503, "the server is currently unable to handle the request")
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if token != ADMIN:
            account = self.tokens.get(token)
            if account is None:
                return _refusal(401, "Unauthorized")
            self.asked.append((account, _VERBS[request.method.value], request.url.path))
            if not self._may(account, request):
                return _refusal(403, f"{account} cannot {_VERBS[request.method.value]} {request.url.path}")
        if request.method.value == "PUT" and request.name is not None:
            return self._replace(request)
        if request.subresource == "eviction":
            key = (request.resource, request.namespace, request.name)
            self._objects[key].patch({"metadata": {"deletionTimestamp": "now"}})
            return aiohttp.web.json_response({"kind": "Status", "status": "Success"}, status=201)
        if request.action == kmock.action.CREATE:
            request.data["metadata"] |= {"resourceVersion": self._next_version(), "uid": f"uid-{self._versions}"}
        return await super()._handle(request)

    def _replace(self, request: rendering.Request) -> aiohttp.web.StreamResponse:
        """Replace an object, if the request names its version."""
        key = (request.resource, request.namespace, request.name)
        if key not in self._objects or self._objects[key].deleted:
            return _refusal(404, f"{request.name} not found")
        if request.data["metadata"].get("resourceVersion") != self._objects[key].raw["metadata"]["resourceVersion"]:
            return _refusal(409, "the object has been modified; please apply your changes to the latest version")
        request.data["metadata"]["resourceVersion"] = self._next_version()
        self._objects[key] = request.data
        return aiohttp.web.json_response(request.data)

    def _next_version(self) -> str:
        self._versions += 1
        return str(self._versions)

    def _may(self, account: str, request: rendering.Request) -> bool:
        """Return whether a Role that is bound to this service account allows the request."""
        mine = {"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}
        bindings = [binding for binding in self.all("RoleBinding") if mine in binding["subjects"]]
        named = {binding["roleRef"]["name"] for binding in bindings}
        rules = [rule for role in self.all("Role") if role["metadata"]["name"] in named for rule in role["rules"]]
        return request.namespace == NAMESPACE and any(
            request.resource.group in rule["apiGroups"]
            and request.resource.plural in rule["resources"]
            and _VERBS[request.method.value] in rule["verbs"]
            and request.name in rule["resourceNames"]
            for rule in rules
        )

    def add(self, kind: str, found: dict[str, Any]) -> None:
        """Add an object, as a controller of the cluster does."""
        self._objects[kmock.resource(_PLURALS[kind]), NAMESPACE, found["metadata"]["name"]] = found

    def change(self, kind: str, name: str, changes: dict[str, Any]) -> None:
        """Change an object, as a controller of the cluster does."""
        space = None if kind == "Node" else NAMESPACE
        self._objects[kmock.resource(_PLURALS[kind]), space, name].patch(changes)

    def remove(self, kind: str, name: str) -> None:
        """Remove an object at once."""
        space = None if kind == "Node" else NAMESPACE
        self._objects[kmock.resource(_PLURALS[kind]), space, name].delete()

    def all(self, kind: str) -> Iterator[dict[str, Any]]:
        """The objects of a kind."""
        wanted = kmock.resource(_PLURALS[kind])
        for (resource, _, _), found in self._objects.items():
            if resource == wanted and not found.deleted:
                yield found.raw


def path_of(kind: str, name: str = "") -> str:
    """The path of an object, or of all of its kind."""
    version, _, plural = _PLURALS[kind].rpartition("/")
    group = f"/apis/{version}" if "/" in version else f"/api/{version}"
    space = "" if kind == "Node" else f"/namespaces/{NAMESPACE}"
    return f"{group}{space}/{plural}" + (f"/{name}" if name else "")


def _refusal(status: int, words: str) -> aiohttp.web.StreamResponse:
    return aiohttp.web.json_response({"kind": "Status", "status": "Failure", "message": words}, status=status)


class ApiServer:
    """The emulator in a thread of its own, inside a network namespace. Use it as a context."""

    def __init__(self, namespace: str, address: str, directory: Path) -> None:
        self.emulator = Emulator()
        self.address = address
        files = Authority(directory).issue("api", address)
        self.authority = Path(files.authority)
        self._server_side = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._server_side.load_cert_chain(files.certificate, files.key)
        self._client_side = ssl.create_default_context(cafile=files.authority)
        self._namespace = namespace
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def _serve(self) -> None:
        enter(self._namespace)  # of this thread alone
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def call(self, work: Callable[[], Awaitable[Any]]) -> Any:
        """Run a coroutine in the server's thread, and return its result."""

        async def run() -> Any:
            return await work()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(30.0)

    def ask(self, method: str, path: str, body: object = None, token: str = ADMIN) -> tuple[int, dict[str, Any]]:
        """Send a request by TLS, as kubectl does; return status and answer."""

        async def send() -> tuple[int, dict[str, Any]]:
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            async with (
                aiohttp.ClientSession() as session,
                session.request(
                    method,
                    f"https://{self.address}:{PORT}{path}",
                    data=None if body is None else json.dumps(body),
                    headers=headers,
                    ssl=self._client_side,
                ) as response,
            ):
                return response.status, await response.json()

        status, answer = self.call(send)
        return int(status), dict(answer)

    def create(self, manifest: dict[str, Any]) -> None:
        """Create an object, or all of a List."""
        for item in manifest["items"] if manifest["kind"] == "List" else [manifest]:
            if item["kind"] != "Node":
                item["metadata"].setdefault("namespace", NAMESPACE)
            status, answer = self.ask("POST", path_of(item["kind"]), item)
            assert status < 300, answer

    def __enter__(self) -> "ApiServer":
        self._thread.start()

        async def begin() -> aiohttp.web.ServerRunner:
            await self.emulator.__aenter__()
            runner = aiohttp.web.ServerRunner(aiohttp.web.Server(self.emulator))
            await runner.setup()
            await aiohttp.web.TCPSite(runner, self.address, PORT, ssl_context=self._server_side).start()
            return runner

        self._runner: aiohttp.web.ServerRunner = self.call(begin)
        return self

    def __exit__(self, *_: object) -> None:
        self.call(self._runner.cleanup)
        self.call(lambda: self.emulator.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
