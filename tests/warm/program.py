"""What the tests of the server run: say what this process is, then do as the argument says."""

import os
import signal
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    print("torch" in sys.modules, os.getpid(), Path.cwd(), os.environ.get("MINE"), *sys.argv[1:], flush=True)
    print("to stderr", file=sys.stderr)
    match sys.argv[1]:
        case "exit":
            sys.exit(int(sys.argv[2]))
        case "raise":
            raise ValueError("of the program")
        case "die":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "wait":
            signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))
            print("ready", flush=True)
            time.sleep(600)
