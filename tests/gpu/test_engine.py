"""The engine's own tests: `python -m unittest` in this folder, with a Python that has PyTorch."""

import asyncio
import json
import logging
import socket
import time
import unittest

import torch

import client
from engine import refusal, request, tokenizer
from engine.cache import KvCache
from engine.legs import Role
from engine.model import CHUNK, Model, Shape, set_up_determinism
from engine.server import Server, Settings
from prompts import CHAT, COMPLETIONS, MODEL

CPU = torch.device("cpu")
ASKED = {"do_remote_decode": True, "do_remote_prefill": False}
set_up_determinism(CPU)
logging.getLogger("asyncio").setLevel(logging.ERROR)  # it tells of every slow step


def body(prompt, tokens=1, **more):
    return {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "return_token_ids": True, **more}


class ModelTest(unittest.TestCase):
    def setUp(self):
        shape = Shape(tokenizer.VOCABULARY)
        self.model = Model(shape, CPU, torch.float32)
        self.cache = KvCache(shape.kv_layout(16, torch.float32), 20, CPU)
        self.prompt = [(7 * place) % 256 for place in range(70)]

    def logits(self, blocks, passes):
        start = 0
        for end in passes:
            logits = self.model.forward(self.prompt[start:end], start, blocks, self.cache)
            start = end
        return logits

    def test_what_is_cached_is_what_would_be_computed(self):
        at_once = self.logits([1, 2, 3, 4, 5], [70])
        one_by_one = self.logits([6, 7, 8, 9, 10], range(1, 71))
        self.assertTrue(torch.allclose(at_once, one_by_one, atol=1e-3))
        self.assertEqual(at_once.argmax(), one_by_one.argmax())

    def test_which_blocks_hold_the_cache_changes_no_bit(self):
        in_order = self.logits([1, 2, 3, 4, 5], [69, 70])
        elsewhere = self.logits([17, 4, 9, 2, 11], [69, 70])
        self.assertTrue(torch.equal(in_order, elsewhere))

    def test_blocks_that_went_through_bytes_change_no_bit_either(self):
        before = self.logits([1, 2, 3, 4, 5], [69, 70])
        content = bytearray(self.cache.to_bytes([1, 2, 3, 4, 5]))
        self.assertEqual(len(content), self.cache.layout.byte_count(5))
        self.cache.from_bytes([11, 12, 13, 14, 15], content)
        after = self.model.forward(self.prompt[69:], 69, [11, 12, 13, 14, 15], self.cache)
        self.assertTrue(torch.equal(before, after))

    def test_every_block_counts(self):
        before = self.logits([1, 2, 3, 4, 5], [69, 70])
        for block in range(1, 5):
            content = bytearray(self.cache.to_bytes([block]))
            self.cache.from_bytes([block], bytearray(len(content)))
            without = self.model.forward(self.prompt[69:], 69, [1, 2, 3, 4, 5], self.cache)
            self.assertFalse(torch.allclose(before, without, atol=1e-2), f"block {block}")
            self.cache.from_bytes([block], content)

    def test_other_processes_draw_the_same_weights(self):
        again = Model(self.model.shape, CPU, torch.float32)
        self.assertTrue(torch.equal(again.layers[3]["down"], self.model.layers[3]["down"]))
        self.assertAlmostEqual(float(again.head.std()), 1 / 16, places=3)


class HandoffTest(unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self):
        self.prefill = await self.start(Role.PREFILL)
        self.decode = await self.start(Role.DECODE)

    async def start(self, role, **settings):
        server = Server(Settings(role, CPU, kv_blocks=80, longest=1200, **settings))
        await server.start()
        self.addCleanup(server.stop)
        return server

    async def post(self, server, content, path=COMPLETIONS):
        return await asyncio.to_thread(client.post, server.address, path, content)

    async def generate(self, server, content, path=COMPLETIONS):
        return await asyncio.to_thread(client.generate, server.address, path, content)

    async def hand_off(self, content, path=COMPLETIONS, prefill=None):
        asked = content | {"max_tokens": 1, "kv_transfer_params": ASKED}
        status, answer = await self.post(prefill or self.prefill, asked, path)
        self.assertEqual(status, 200, answer)
        return content | {"kv_transfer_params": json.loads(answer)["kv_transfer_params"]}

    async def refused(self, content, count):
        before = self.decode.engine.state()
        status, answer = await self.post(self.decode, content)
        self.assertEqual(status, 500, answer)
        after = self.decode.engine.state()
        self.assertEqual(after[count], before[count] + 1, answer)
        self.assertEqual(after["prompt_tokens_computed"], before["prompt_tokens_computed"])
        self.assertEqual(after["blocks_used"], 0)

    async def test_two_halves_answer_as_one_engine(self):
        aggregated = await self.start(Role.AGGREGATED)
        for length in (1, 2, 16, 17, CHUNK, CHUNK + 1, CHUNK + 2):
            content = body([place * 31 % 256 for place in range(length)], 12)
            wanted = await self.generate(aggregated, content)
            for streamed in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
                found = await self.generate(self.decode, await self.hand_off(content) | streamed)
                self.assertEqual(found, wanted, f"{length} tokens")
        state = self.decode.engine.state()
        self.assertEqual((state["prompt_tokens_computed"], state["recomputed"]), (14, 0))
        self.assertEqual(self.prefill.engine.state()["handoffs_consumed"], 14)
        self.assertEqual((self.prefill.engine.pool.used, self.decode.engine.pool.used), (0, 0))

    async def test_chat_too(self):
        aggregated = await self.start(Role.AGGREGATED)
        messages = [{"role": "user", "content": [{"type": "text", "text": "Grüße"}]}]
        content = body(None, 9, messages=messages)
        wanted = await self.generate(aggregated, content, CHAT)
        found = await self.generate(self.decode, await self.hand_off(content, CHAT) | {"stream": True}, CHAT)
        self.assertEqual((found.tokens, found.text, found.finish), (wanted.tokens, wanted.text, wanted.finish))

    async def test_the_kv_that_came_is_the_kv_that_is_used(self):
        content = body(list(range(50)), 12)
        wanted = await self.generate(self.decode, await self.hand_off(content))
        handed = await self.hand_off(content)
        (blocks,) = handed["kv_transfer_params"]["remote_block_ids"]
        cache = self.prefill.engine.runner.cache
        cache.from_bytes(blocks[:1], bytearray(cache.layout.byte_count(1)))
        self.assertNotEqual((await self.generate(self.decode, handed)).tokens, wanted.tokens)

    async def test_a_handoff_is_used_once(self):
        handed = await self.hand_off(body([1, 2, 3]))
        self.assertEqual((await self.post(self.decode, handed))[0], 200)
        await self.refused(handed, "refused_used_handoff")

    async def test_a_refused_pull_leaves_the_handoff_as_it_was(self):
        handed = await self.hand_off(body(list(range(20))))
        params = handed["kv_transfer_params"]
        wrong = [
            {"remote_engine_id": "other"},
            {"remote_request_id": "other"},
            {"remote_block_ids": [[1]]},
            {"remote_block_ids": []},
            {"tp_size": 2},
            {"remote_port": "x"},
            {"do_remote_decode": True},
        ]
        for change in wrong:
            await self.refused(handed | {"kv_transfer_params": params | change}, "refused_wrong_handoff")
        await self.refused(handed | {"prompt": list(range(21))}, "refused_wrong_handoff")
        await self.refused(handed | {"prompt": list(range(40))}, "refused_wrong_handoff")
        self.assertEqual((await self.post(self.decode, handed))[0], 200)

    async def test_a_decode_leg_needs_a_handoff(self):
        for params in (None, {}, ASKED):
            await self.refused(body([1, 2]) | {"kv_transfer_params": params}, "refused_missing_handoff")

    async def test_a_lease_ends(self):
        prefill = await self.start(Role.PREFILL, lease=0.05)
        handed = await self.hand_off(body([1, 2, 3]), prefill=prefill)
        await asyncio.sleep(0.2)
        await self.refused(handed, "refused_expired_handoff")
        state = prefill.engine.state()
        self.assertEqual((state["handoffs_expired"], state["blocks_used"]), (1, 0))

    async def test_a_prefill_engine_that_is_gone(self):
        handed = await self.hand_off(body([1, 2, 3]))
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
        gone = handed["kv_transfer_params"] | {"remote_port": port}
        await self.refused(handed | {"kv_transfer_params": gone}, "refused_unreachable_handoff")

    async def test_caches_of_another_kind_do_not_mix(self):
        prefill = await self.start(Role.PREFILL, dtype=torch.bfloat16)
        await self.refused(await self.hand_off(body([1, 2, 3]), prefill=prefill), "refused_wrong_handoff")

    async def test_a_pull_that_breaks_off_can_be_made_again(self):
        handed = await self.hand_off(body(list(range(40))))
        read = self.decode.engine.runner.from_bytes
        self.decode.engine.runner.from_bytes = fail
        await self.refused(handed, "refused_unreachable_handoff")
        self.decode.engine.runner.from_bytes = read
        await asyncio.sleep(0.1)
        self.assertEqual((await self.post(self.decode, handed))[0], 200)

    async def test_an_output_that_ends_with_its_first_token_is_not_handed_off(self):
        for token in range(tokenizer.VOCABULARY):
            status, answer = await self.post(self.prefill, body([token], kv_transfer_params=ASKED))
            answer = json.loads(answer)
            ended = answer["choices"][0]["token_ids"] == [tokenizer.END]
            self.assertEqual((status, answer["choices"][0]["finish_reason"] == "stop"), (200, ended))
            self.assertEqual(answer["kv_transfer_params"] is None, ended)
            if ended:
                return
            await self.post(self.decode, body([token], kv_transfer_params=answer["kv_transfer_params"]))
        self.fail("no prompt of one token ends at once")

    async def test_only_prefill_legs_are_run_by_a_prefill_engine(self):
        faults = [{"kv_transfer_params": None}, {"stream": True}, {"max_tokens": 2}]
        faults += [{"kv_transfer_params": params} for params in ({}, ASKED | {"do_remote_prefill": True})]
        for fault in faults:
            status, answer = await self.post(self.prefill, body([1, 2], kv_transfer_params=ASKED) | fault)
            self.assertEqual(status, 400, answer)
        self.assertEqual(self.prefill.engine.counts.refused_not_a_prefill_leg, len(faults))

    async def test_a_client_that_leaves_frees_the_blocks(self):
        aggregated = await self.start(Role.AGGREGATED)
        for after_bytes in (0, 1500):
            content = body(list(range(100)), 1000, stream=True, ignore_eos=True)
            await asyncio.to_thread(client.leave, aggregated.address, COMPLETIONS, content, after_bytes)
        deadline = time.monotonic() + 5
        while aggregated.engine.counts.aborted < 2 and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        state = aggregated.engine.state()
        self.assertEqual((state["aborted"], state["running"], state["blocks_used"]), (2, 0, 0))

    async def test_who_finds_no_blocks_waits(self):
        aggregated = await self.start(Role.AGGREGATED)
        contents = [body([number] * 500, 10) for number in range(5)]
        together = await asyncio.gather(*(self.generate(aggregated, content) for content in contents))
        alone = [await self.generate(aggregated, content) for content in contents]
        self.assertEqual(together, alone)


async def fail(*_):
    raise ValueError("as the test asks")


class WebTest(unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self):
        self.server = Server(Settings(Role.AGGREGATED, CPU))
        await self.server.start()
        self.addCleanup(self.server.stop)

    async def test_chunked_bodies_and_connections_that_stay_open(self):
        host, port = self.server.address.split(":")
        reader, writer = await asyncio.open_connection(host, port)
        content = json.dumps(body("x", 2)).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nX-Request-Id: r7\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        pieces = b"".join(b"%x;a=b\r\n%b\r\n" % (len(piece), piece) for piece in (content[:5], content[5:]))
        for _ in range(3):
            writer.write(head + pieces + b"0\r\nTrailer: 1\r\n\r\n")
            answer = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.assertIn("200 OK", answer)
            self.assertIn("x-request-id: r7", answer)
            length = int(answer.split("content-length: ")[1].split("\r\n")[0])
            self.assertEqual(json.loads(await reader.readexactly(length))["id"], "cmpl-r7")
        writer.close()

    async def test_paths(self):
        async def get(path):
            return await asyncio.to_thread(client.exchange, self.server.address, "GET", path, None)

        self.assertEqual(await get("/health"), (200, ""))
        self.assertIn(MODEL, (await get("/v1/models"))[1])
        self.assertEqual((await get("/nothing"))[0], 404)
        self.assertEqual((await get(COMPLETIONS))[0], 405)
        other = body("x") | {"model": "y"}
        status, answer = await asyncio.to_thread(client.post, self.server.address, COMPLETIONS, other)
        self.assertEqual((status, json.loads(answer)["error"]["type"]), (404, "NotFoundError"))

    async def test_what_is_not_http_ends_the_connection(self):
        host, port = self.server.address.split(":")
        for nonsense in (b"hello\r\n\r\n", b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n"):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(nonsense)
            self.assertIn(b"400 Bad Request", await reader.read())
            writer.close()


class RequestTest(unittest.TestCase):
    def test_faults_are_refused_by_name(self):
        faults = {
            "model": {"model": None},
            "prompt": {"prompt": []},
            "token ids": {"prompt": [1, 999]},
            "one string": {"prompt": ["a", "b"]},
            "max_tokens": {"max_tokens": 0},
            "`max_tokens`": {"max_tokens": True},
            "min_tokens": {"min_tokens": 2},
            "Stream options": {"stream_options": {}},
            "n must": {"n": 2},
            "kv_transfer_params": {"kv_transfer_params": []},
        }
        for words, fault in faults.items():
            with self.assertRaisesRegex(refusal.Refusal, words):
                request.parse(COMPLETIONS, json.dumps(body([1]) | fault).encode())
        for text in (b"", b"[]", b"\xff", b"[" * 100_000):
            with self.assertRaisesRegex(refusal.Refusal, "Invalid JSON"):
                request.parse(COMPLETIONS, text)

    def test_limits(self):
        def limit(path, **fields):
            content = {"model": MODEL, "prompt": "x", "messages": [{"role": "user"}], **fields}
            return request.parse(path, json.dumps(content).encode()).output_tokens

        self.assertEqual(limit(CHAT), request.DEFAULT_OUTPUT_TOKENS)
        self.assertEqual(limit(CHAT, max_tokens=5), 5)
        self.assertEqual(limit(CHAT, max_tokens=5, max_completion_tokens=4), 4)
        self.assertEqual(limit(COMPLETIONS, max_tokens=5, max_completion_tokens=4), 5)

    def test_text_comes_in_whole_characters(self):
        decoder = tokenizer.Decoder()
        pieces = [decoder.push(token) for token in [*"é".encode(), tokenizer.END, 0xC3]]
        self.assertEqual([*pieces, decoder.end()], ["", "é", "", "", "\ufffd"])


if __name__ == "__main__":
    unittest.main()
