from kvservice.cli import main

main()
