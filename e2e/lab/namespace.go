package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

const namespaceFolder = "/run/netns" // where iproute2 keeps named network namespaces

// inNamespace runs f on a thread that is in the named network namespace. Sockets that f opens stay
// in it.
func inNamespace(name string, f func() error) error {
	errc := make(chan error, 1)
	// A goroutine of its own: if the thread cannot go back it ends locked, and the runtime throws the
	// thread away.
	go func() {
		runtime.LockOSThread()
		home, err := os.Open("/proc/thread-self/ns/net")
		if err != nil {
			errc <- err
			return
		}
		defer home.Close()
		target, err := os.Open(filepath.Join(namespaceFolder, name))
		if err != nil {
			errc <- err
			return
		}
		defer target.Close()
		if err := unix.Setns(int(target.Fd()), unix.CLONE_NEWNET); err != nil {
			errc <- fmt.Errorf("enter network namespace %s: %w", name, err)
			return
		}
		err = f()
		if back := unix.Setns(int(home.Fd()), unix.CLONE_NEWNET); back == nil {
			runtime.UnlockOSThread()
		}
		errc <- err
	}()
	return <-errc
}

// dialIn opens a connection from the named network namespace. address must be an IP address and a
// port.
func dialIn(ctx context.Context, namespace string, dialer *net.Dialer, network, address string) (net.Conn, error) {
	var conn net.Conn
	err := inNamespace(namespace, func() (err error) {
		conn, err = dialer.DialContext(ctx, network, address)
		return err
	})
	return conn, err
}

// batch runs iproute2 commands, one a line, in the named network namespace; the empty name is the
// caller's own.
func batch(ctx context.Context, namespace string, commands []string) error {
	argv := []string{"ip", "-batch", "-"}
	if namespace != "" {
		argv = []string{"ip", "-netns", namespace, "-batch", "-"}
	}
	return feed(ctx, strings.Join(commands, "\n")+"\n", argv...)
}

// feed runs a program with a text as its input.
func feed(ctx context.Context, input string, argv ...string) error {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Stdin = strings.NewReader(input)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(argv, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}

// setSysctls writes to /proc/sys/net as the named namespace sees it. Keys are paths below it; a key
// that ends in ? may be missing.
func setSysctls(namespace string, values map[string]string) error {
	return inNamespace(namespace, func() error {
		var errs []error
		for key, value := range values {
			key, optional := strings.CutSuffix(key, "?")
			err := os.WriteFile(filepath.Join("/proc/sys/net", key), []byte(value), 0)
			if err != nil && (!optional || !errors.Is(err, os.ErrNotExist)) {
				errs = append(errs, fmt.Errorf("sysctl: %w", err))
			}
		}
		return errors.Join(errs...)
	})
}

// namespacesWith lists the named network namespaces that begin with prefix.
func namespacesWith(prefix string) ([]string, error) {
	entries, err := os.ReadDir(namespaceFolder)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), prefix) {
			names = append(names, e.Name())
		}
	}
	return names, nil
}
