"""Wrong channels: the built-in `tcp`, and what each does otherwise."""

from draftcore_sdk.channels import ChannelSuite

from mutants import Mutants, one_file, wrong

RIGHT = """
import json
import threading
import time

from draftcore_disagg.channel import ChannelAway
from draftcore_disagg import tcp

class Client(tcp.TcpClient):
    pass

class Service:
    def __init__(self, service):
        self.service = service

    def answer(self, request):
        return self.service.answer(request)

    def lost(self, producer):
        self.service.lost(producer)

class Channel(tcp.TcpChannel):
    def serve(self, service):
        return super().serve(Service(service))

    def connect(self, find):
        return Client(find, self.secret, self.patience)

== Offer("channel", "{name}")
== channel(name, uri, secret, patience): Channel.open("tcp", secret, patience)
"""
WRONG = """
== reverses_tasks: test_tasks_and_refs_come_in_order_and_whole_however_large[3-5]
Client.call(request):
    reply = super().call(request)
    if request["call"] == "claim":
        reply["answer"][0].reverse()
    return reply
== makes_doubles_of_numbers: test_tasks_and_refs_come_in_order_and_whole_however_large[3-5]: came as
Client.call(request): return json.loads(json.dumps(super().call(request)), parse_int=float)
== speaks_ascii: test_a_failure_arrives_with_its_rows
Client.call(request):
    text = json.dumps(request, ensure_ascii=False)
    return super().call(json.loads(text.encode("ascii", "ignore")))
== takes_every_publication_for_taken: test_a_late_publication_is_told_that_it_is_late
Client.call(request):
    reply = super().call(request)
    return {"answer": True} if request["call"] == "publish" else reply
== has_short_lines: test_tasks_and_refs_come_in_order_and_whole_however_large[8-4000]
Client.call(request):
    line = json.dumps(super().call(request))
    return json.loads(line) if len(line) < 2**16 else {"error": "too long"}
== writes_tensors_as_text: test_a_tensor_is_refused_where_it_is_serialised
Client.call(request): return super().call(json.loads(json.dumps(request, default=str)))
== does_not_wait: test_a_claim_waits_for_an_offer_and_no_longer
Service.answer(request): return super().answer({**request, "wait": 0})
== waits_to_the_end: test_a_claim_waits_for_an_offer_and_no_longer
Service.answer(request):
    reply = super().answer(request)
    time.sleep(request.get("wait", 0))
    return reply
== answers_one_by_one: test_who_waits_holds_nobody_up
MUTEX = threading.Lock()
Service.answer(request):
    with MUTEX:
        return super().answer(request)
== finishes_its_call: test_a_client_that_closes_ends_its_own_call
Client.close():
    if not self.mutex.locked():
        super().close()
== knows_one_end: test_a_producer_hears_at_once_that_the_run_is_over[finished]
Client.call(request):
    reply = super().call(request)
    return {"ended": "failed"} if "ended" in reply else reply
== keeps_heartbeats_to_itself: test_a_heartbeat_is_heard
Client.call(request):
    return {"answer": None} if request["call"] == "heartbeat" else super().call(request)
== tells_nobody_who_left: test_a_client_that_closes_returns_its_claims
Service.lost(producer): pass
== keeps_the_dead_alive: test_a_killed_producer_loses_its_claims
Service.answer(request):
    threading.Thread(target=self.beat, args=[request["producer"]], daemon=True).start()
    return super().answer(request)
Service.beat(producer):
    while True:
        self.service.answer({"call": "heartbeat", "producer": producer})
        time.sleep(0.1)
Service.lost(producer): pass
== mixes_up_threads: test_threads_of_one_client_get_their_own_replies
Client.call(request):
    self.request = request
    time.sleep(0.01)
    return super().call(self.request)
== needs_its_trainer_first: test_a_producer_may_begin_before_its_trainer
Channel.connect(find):
    if not find():
        raise ChannelAway("there is no trainer")
    return super().connect(find)
== looks_the_address_up_once: test_a_producer_goes_on_with_the_next_trainer
Channel.connect(find):
    address = find()
    return super().connect(lambda: address)
== has_no_patience: test_a_client_waits_for_its_trainer_and_then_gives_up
Client.__init__(find, secret, patience): super().__init__(find, secret, 0.0)
== knows_no_secrets: test_another_secret_is_refused_and_harms_nobody
class Channel(Channel):
    @classmethod
    def open(cls, uri, secret, patience=600.0):
        return super().open(uri, b"everybody's", patience)
== is_felled_by_a_stranger: test_another_secret_is_refused_and_harms_nobody
class Service(Service):
    requests = 0

    def answer(self, request):
        self.requests += 1
        return super().answer(request)
Channel._serve_one(sock, service):
    seen = Service(service)
    super()._serve_one(sock, seen)
    if not seen.requests:
        self.close()
== answers_whoever_asked_last: test_every_task_is_done_once_by_several_producers
Service.answer(request):
    self.reply = super().answer(request)
    time.sleep(0.02)
    return self.reply
== takes_nothing_for_none: test_a_batch_without_a_row_is_there
Client.call(request):
    reply = super().call(request)
    return {**reply, "answer": reply["answer"] or None} if "answer" in reply else reply
== loses_all_where_one_leaves: test_a_client_that_closes_returns_its_claims
class Service(Service):
    seen = set()

    def answer(self, request):
        self.seen.add(request["producer"])
        return super().answer(request)

    def lost(self, producer):
        for one in self.seen:
            super().lost(one)
== ends_with_an_old_connection: test_a_connection_that_breaks_is_not_its_producers_end: connected anew
HEARD = threading.local()
Service.answer(request):
    HEARD.producer = request["producer"]
    return super().answer(request)
Channel._serve_one(sock, service):
    super()._serve_one(sock, service)
    service.lost(HEARD.producer)
== leaves_its_threads: test_what_is_closed_leaves_nothing_open
Channel.serve(service):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    return super().serve(service)
== leaves_its_sockets: test_what_is_closed_leaves_nothing_open
import socket
Client.__init__(*given):
    super().__init__(*given)
    self.beside = socket.socketpair()
    KEPT.append(self.beside)

KEPT = []
== waits_without_end: test_a_client_waits_for_its_trainer_and_then_gives_up
Client.__init__(find, secret, patience): super().__init__(find, secret, float("inf"))
== cuts_long_messages: test_tasks_and_refs_come_in_order_and_whole_however_large[8-4000]
Client.call(request):
    while len(json.dumps(reply := super().call(request))) > 2**16:
        time.sleep(0.1)
    return reply
== closes_only_the_listener: test_a_client_waits_for_its_trainer_and_then_gives_up
Channel.close():
    if getattr(self, "listener", None) is not None:
        self.listener.close()
== raises_what_the_queue_raised: test_a_producer_hears_at_once_that_the_run_is_over[failed]
Service.answer(request):
    reply = super().answer(request)
    if "error" in reply or "ended" in reply:
        raise RuntimeError(str(reply))
    return reply
"""

MUTANTS = Mutants(ChannelSuite, one_file(RIGHT), wrong(WRONG), soon=1.0)
