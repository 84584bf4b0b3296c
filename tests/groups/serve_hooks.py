"""For the schemathesis run of serve_clients.py: about two of three generated bodies that are acceptable as text name things that exist, so
that the run gets past 404, and ask for few steps. Values that the schema forbids stay as they were made."""
import json
import zlib

import schemathesis

REAL = {"lora_nickname": "n", "nickname": "n", "lora_path": "noto", "path": "noto", "prompt": "a cat", "target": "all", "size": "32x32"}


def better(name, value):
    if isinstance(value, bool) or name not in REAL and name not in ("n", "num_inference_steps"):
        return value
    if isinstance(value, int):
        return 2 if 2 < value <= 1000 and (name != "n" or value <= 64) else value
    if isinstance(value, str) and 0 < len(value) <= 64:
        return REAL.get(name, value)
    if isinstance(value, list) and len(value) == 1:
        return [better(name, value[0])]
    return value


@schemathesis.hook
def map_body(context, body):  # pylint: disable=unused-argument
    if not isinstance(body, dict):
        return body
    few = {k: better(k, v) if k in ("n", "num_inference_steps") else v for k, v in body.items()}
    if zlib.crc32(json.dumps(body, sort_keys=True, default=str).encode()) % 3 == 0:
        return few
    body = {k: better(k, v) for k, v in few.items()}
    if isinstance(body.get("loras"), list):
        body["loras"] = [{k: better(k, v) for k, v in lora.items()} if isinstance(lora, dict) else lora for lora in body["loras"][:2]]
    return body
