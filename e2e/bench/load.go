package main

import (
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// load opens connections one after the other from a number of threads, sends a byte over each,
// waits for one and resets the connection, so that no port stays in use. It prints how many a
// second were answered, and how many failed.
func load(args []string) error {
	set := flag.NewFlagSet(loadCommand, flag.ContinueOnError)
	target := set.String("target", "", "address and port")
	threads := set.Int("threads", 16, "connections at a time")
	seconds := set.Int("seconds", 3, "how long")
	if err := set.Parse(args); err != nil {
		return err
	}
	address, err := netip.ParseAddrPort(*target)
	if err != nil {
		return err
	}
	to := &unix.SockaddrInet4{Addr: address.Addr().As4(), Port: int(address.Port())}
	var answered, failed atomic.Int64
	var wg sync.WaitGroup
	start := time.Now()
	until := start.Add(time.Duration(*seconds) * time.Second)
	for range *threads {
		wg.Go(func() {
			runtime.LockOSThread()
			for time.Now().Before(until) {
				if err := exchange(to); err != nil {
					failed.Add(1)
				} else {
					answered.Add(1)
				}
			}
		})
	}
	wg.Wait()
	fmt.Printf("%.0f %d\n", float64(answered.Load())/time.Since(start).Seconds(), failed.Load())
	return nil
}

func exchange(to unix.Sockaddr) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	tv := unix.NsecToTimeval(time.Second.Nanoseconds())
	_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &tv)
	_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv)
	_ = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	if err := unix.Connect(fd, to); err != nil {
		return err
	}
	b := []byte{'?'}
	if _, err := unix.Write(fd, b); err != nil {
		return err
	}
	n, err := unix.Read(fd, b)
	if err == nil && n != 1 {
		err = errors.New("closed")
	}
	return err
}

// serve answers each connection's first byte with a byte, from a few threads, until it is killed.
func serve(args []string) error {
	set := flag.NewFlagSet(serveCommand, flag.ContinueOnError)
	port := set.Int("port", loadPort, "TCP port")
	threads := set.Int("threads", 16, "connections at a time")
	if err := set.Parse(args); err != nil {
		return err
	}
	listener, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	if err := errors.Join(unix.Bind(listener, &unix.SockaddrInet4{Port: *port}), unix.Listen(listener, 4096)); err != nil {
		return err
	}
	var wg sync.WaitGroup
	for range *threads {
		wg.Go(func() {
			runtime.LockOSThread()
			b := []byte{0}
			for {
				fd, _, err := unix.Accept4(listener, unix.SOCK_CLOEXEC)
				if err != nil {
					continue
				}
				if n, err := unix.Read(fd, b); err == nil && n == 1 {
					_, _ = unix.Write(fd, b)
					_, _ = unix.Read(fd, b) // until the client has gone
				}
				unix.Close(fd)
			}
		})
	}
	wg.Wait()
	return nil
}
