"""Objects at S3 and what speaks its protocol, through s3fs's client.

Conditional writes are S3's own: `If-None-Match: *` for an object that must not exist, `If-Match` with the ETag of the
one that is to be replaced.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from pltpack.errors import StoreError
from pltpack.store.objects import Listed, Objects
from pltpack.store.patience import ChangedError, ShortError

#: Larger files are sent in parts of this many bytes; S3 takes 10,000 parts.
PART_BYTES = 1 << 26
_MOST_PARTS = 10_000
# What S3 and its likes answer where a condition does not hold.
_CHANGED = frozenset({"PreconditionFailed", "412"})


class S3Objects(Objects):
    """A bucket's objects below a prefix.

    Parameters
    ----------
    fs : s3fs.S3FileSystem
    root : str
        ``bucket/prefix``.
    """

    def __init__(self, fs: Any, root: str) -> None:
        self._fs = fs
        self._bucket, _, prefix = root.strip("/").partition("/")
        self._prefix = f"{prefix}/" if prefix else ""

    def _sync(self, method: Any, *args: Any, timeout: float) -> Any:
        from fsspec.asyn import sync

        # An error met while another one is handled has that one for its context, and is not of its kind.
        handled = sys.exception()
        try:
            return sync(self._fs.loop, method, *args, timeout=timeout)
        except Exception as error:
            if _code(error, handled) in _CHANGED:
                raise ChangedError(str(error)) from error
            raise

    async def _call(self, method: str, name: str, **given: Any) -> Any:
        return await self._fs._call_s3(method, Bucket=self._bucket, Key=self._prefix + name, **given)

    async def _get(self, name: str, span: str | None) -> tuple[bytes, dict[str, Any]]:
        answer = await self._call("get_object", name, **({} if span is None else {"Range": span}))
        async with answer["Body"] as body:
            data = await body.read()
        if len(data) != answer["ContentLength"]:
            raise ShortError(f"{len(data)} of {answer['ContentLength']} bytes came")
        return data, answer

    def get(self, name: str, timeout: float) -> tuple[bytes, str]:
        """See `Objects.get`; the state is the ETag."""
        data, answer = self._sync(self._get, name, None, timeout=timeout)
        return data, answer["ETag"]

    def head(self, name: str, length: int, timeout: float) -> tuple[bytes, int]:
        """See `Objects.head`."""
        data, answer = self._sync(self._get, name, f"bytes=0-{length - 1}", timeout=timeout)
        total = re.fullmatch(r"bytes 0-\d+/(\d+)", answer.get("ContentRange") or "")
        size = int(total[1]) if total else len(data)
        if len(data) < min(length, size):
            raise ShortError(f"{len(data)} of {min(length, size)} bytes came")
        return data[:length], size

    def read(self, name: str, begin: int, end: int, timeout: float) -> bytes:
        """See `Objects.read`."""
        data, answer = self._sync(self._get, name, f"bytes={begin}-{end - 1}", timeout=timeout)
        found = re.match(r"bytes (\d+)-", answer.get("ContentRange") or "")
        if len(data) != end - begin or found is None or int(found[1]) != begin:
            raise ShortError(f"{len(data)} of {end - begin} bytes came")
        return bytes(data)

    def create(self, name: str, file: Path, timeout: float) -> None:
        """See `Objects.create`."""
        if file.stat().st_size > PART_BYTES:
            self._sync(self._create_in_parts, name, file, timeout=timeout)
        else:
            self.replace(name, file.read_bytes(), None, timeout)

    async def _create_in_parts(self, name: str, file: Path) -> None:
        upload = (await self._call("create_multipart_upload", name))["UploadId"]
        try:
            size = max(PART_BYTES, -(-file.stat().st_size // _MOST_PARTS))
            parts: list[dict[str, Any]] = []
            with open(file, "rb") as data:
                while part := data.read(size):
                    number = len(parts) + 1
                    answer = await self._call("upload_part", name, UploadId=upload, PartNumber=number, Body=part)
                    parts.append({"PartNumber": number, "ETag": answer["ETag"]})
            await self._call("complete_multipart_upload", name, UploadId=upload, MultipartUpload={"Parts": parts},
                             IfNoneMatch="*")  # fmt: skip
        except BaseException:
            await self._call("abort_multipart_upload", name, UploadId=upload)
            raise

    def replace(self, name: str, data: bytes, version: str | None, timeout: float) -> None:
        """See `Objects.replace`."""
        condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": version}
        try:
            self._sync(self._put, name, data, condition, timeout=timeout)
        except FileNotFoundError as error:
            if version is None:
                raise StoreError("there is no such bucket", f"s3://{self._bucket}") from error
            raise ChangedError("it is not there any more") from error

    async def _put(self, name: str, data: bytes, condition: dict[str, str]) -> None:
        await self._call("put_object", name, Body=data, **condition)

    def delete(self, name: str, timeout: float) -> None:
        """See `Objects.delete`."""
        self._sync(self._delete, name, timeout=timeout)

    async def _delete(self, name: str) -> None:
        await self._call("delete_object", name)

    def listed(self, timeout: float) -> list[Listed]:
        """See `Objects.listed`."""
        found: list[Listed] = self._sync(self._list, timeout=timeout)
        return found

    async def _list(self) -> list[Listed]:
        out: list[Listed] = []
        more: dict[str, str] = {}
        while True:
            answer = await self._fs._call_s3("list_objects_v2", Bucket=self._bucket, Prefix=self._prefix, **more)
            for entry in answer.get("Contents", ()):
                out.append(Listed(entry["Key"][len(self._prefix) :], entry["LastModified"].timestamp()))
            if not answer.get("IsTruncated"):
                return out
            more = {"ContinuationToken": answer["NextContinuationToken"]}


def _code(error: BaseException, before: BaseException | None) -> str:
    """The error code of S3's answer, which s3fs keeps as the cause of what it raises instead; not that of `before`."""
    seen: BaseException | None = error
    while seen is not None and seen is not before:
        response = getattr(seen, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
        seen = seen.__cause__ or seen.__context__
    return ""
