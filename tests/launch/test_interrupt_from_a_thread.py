"""A run in a thread can be ended from another one, as the Stop button of a workbench does."""

import threading
import time

from shardlab.launch import RankPool, current


def test_interrupt_ends_a_run_in_another_thread_and_the_pool_goes_on():
    def endless(rank):
        current().emit("begun")
        while True:
            time.sleep(0.01)

    pool, begun, ended = RankPool(2, device="cpu"), threading.Event(), []

    def run():
        try:
            pool.run(endless, on_message=lambda *_: begun.set())
        except BaseException as error:
            ended.append(type(error))

    pool.interrupt()  # nothing runs: nothing happens
    with pool:
        thread = threading.Thread(target=run)
        thread.start()
        assert begun.wait(30)
        pool.interrupt()
        thread.join(30)
        assert ended == [KeyboardInterrupt]
        assert pool.pids == ()
        assert pool.run(lambda rank: rank) == [0, 1]
