#!/usr/bin/env python3
"""image.py PLUGIN FOLDER VERSION ARCHITECTURE: the plugin as an OCI image layout, the same bytes for the same plugin.

One layer holds plugin.wasm at its root, as Istio and Envoy Gateway look for it, and a container engine can mount it.
"""

import gzip
import hashlib
import io
import json
import pathlib
import shutil
import sys
import tarfile

DAWN = "1970-01-01T00:00:00Z"  # when it was made is nobody's business: an image of the same plugin is the same image
OCI = "application/vnd.oci.image"


def layer_of(plugin):
    """The layer, unpacked and packed."""
    entry = tarfile.TarInfo("plugin.wasm")
    entry.size = len(plugin)
    entry.mode = 0o644
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        archive.addfile(entry, io.BytesIO(plugin))
    packed = io.BytesIO()
    with gzip.GzipFile(filename="", fileobj=packed, mode="wb", compresslevel=9, mtime=0) as stream:
        stream.write(raw.getvalue())
    return raw.getvalue(), packed.getvalue()


def digest(content):
    return "sha256:" + hashlib.sha256(content).hexdigest()


def written(folder, media_type, content):
    """Writes a blob, and says how it is referred to."""
    name = digest(content)
    path = folder / "blobs" / "sha256" / name.removeprefix("sha256:")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return {"mediaType": media_type, "digest": name, "size": len(content)}


def as_json(value):
    return json.dumps(value, indent=2, sort_keys=True).encode() + b"\n"


def write(plugin, folder, version, architecture):
    raw, packed = layer_of(plugin)
    labels = {
        "org.opencontainers.image.title": "pd-router",
        "org.opencontainers.image.description": "Proxy-Wasm filter: a prefill/decode router for LLM serving, in Envoy",
        "org.opencontainers.image.licenses": "Apache-2.0",
        "org.opencontainers.image.version": version,
    }
    config = {
        "architecture": architecture,
        "os": "linux",
        "created": DAWN,
        "config": {"Labels": labels},
        "rootfs": {"type": "layers", "diff_ids": [digest(raw)]},
        "history": [{"created": DAWN, "created_by": "make image"}],
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{OCI}.manifest.v1+json",
        "config": written(folder, f"{OCI}.config.v1+json", as_json(config)),
        "layers": [written(folder, f"{OCI}.layer.v1.tar+gzip", packed)],
        "annotations": labels,
    }
    entry = written(folder, manifest["mediaType"], as_json(manifest))
    entry["annotations"] = {"org.opencontainers.image.ref.name": version}
    entry["platform"] = {"architecture": architecture, "os": "linux"}
    index = {"schemaVersion": 2, "mediaType": f"{OCI}.index.v1+json", "manifests": [entry]}
    (folder / "index.json").write_bytes(as_json(index))
    (folder / "oci-layout").write_bytes(as_json({"imageLayoutVersion": "1.0.0"}))
    return entry["digest"]


def main():
    if len(sys.argv) != 5:
        sys.exit(__doc__.splitlines()[0])
    plugin, folder, version, architecture = sys.argv[1:]
    folder = pathlib.Path(folder)
    fresh = folder.with_name(folder.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    named = write(pathlib.Path(plugin).read_bytes(), fresh, version, architecture)
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)
    print(f"{version}@{named}")


if __name__ == "__main__":
    main()
