// Command landfallctl shows what Landfall does in a cluster, and says why something is not
// reachable. Installed as kubectl-landfall it is a kubectl plugin.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
)

// Exit codes.
const (
	exitWell = 0
	// exitWrong says that something in the cluster is wrong.
	exitWrong = 1
	// exitUnable says that landfallctl could not tell: wrong usage, no answer, no permission.
	exitUnable = 2
)

// errWrong ends the program with exitWrong; what is wrong was printed.
var errWrong = errors.New("something is wrong")

// errUnable ends the program with exitUnable; what could not be read was printed.
var errUnable = errors.New("not everything could be read")

func main() {
	os.Exit(execute(os.Args, os.Stdin, os.Stdout, os.Stderr))
}

// execute runs the program with these arguments, and returns its exit code.
func execute(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends the program, whatever it still tidies up
	stdout, stderr = plainWriter{stdout}, plainWriter{stderr}
	command := newCommand(args[0])
	command.SetArgs(args[1:])
	command.SetIn(stdin)
	command.SetOut(stdout)
	command.SetErr(stderr)
	switch err := command.ExecuteContext(ctx); {
	case err == nil:
		return exitWell
	case errors.Is(err, errWrong):
		return exitWrong
	case errors.Is(err, errUnable):
		return exitUnable
	default:
		fmt.Fprintf(stderr, "%s: %v\n", command.DisplayName(), err)
		return exitUnable
	}
}
