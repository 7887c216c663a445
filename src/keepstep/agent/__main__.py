import os

from keepstep.agent.main import main

if __name__ == "__main__":
    raise SystemExit(main(os.environ))
