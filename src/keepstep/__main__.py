from keepstep.cli.main import main

main()
