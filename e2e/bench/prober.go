package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// prober asks pods' servers from one network namespace, each time over a new connection, and gives
// up early: what is not programmed yet is silent, and TCP would ask again only after a second.
type prober struct{ jobs chan func() }

const (
	connectTimeout = 2 * time.Millisecond
	answerTimeout  = 100 * time.Millisecond
	pause          = 500 * time.Microsecond
)

func newProber(namespace string) (*prober, error) {
	p := &prober{jobs: make(chan func())}
	entered := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		if err := enter(namespace); err != nil {
			entered <- err
			return
		}
		close(entered)
		for job := range p.jobs {
			job()
		}
	}()
	return p, <-entered
}

func (p *prober) close() { close(p.jobs) }

func enter(namespace string) error {
	file, err := os.Open(filepath.Join("/run/netns", namespace))
	if err != nil {
		return err
	}
	defer file.Close()
	return unix.Setns(int(file.Fd()), unix.CLONE_NEWNET)
}

// ask returns the name of the pod that answers.
func (p *prober) ask(address netip.AddrPort) (pod string, err error) {
	done := make(chan struct{})
	p.jobs <- func() {
		pod, err = ask(address)
		close(done)
	}
	<-done
	return pod, err
}

// wait asks until pod answers, or any if pod is empty, and returns which one does.
func (p *prober) wait(ctx context.Context, address netip.AddrPort, pod string, until time.Time) (answer string,
	err error) {
	for time.Now().Before(until) && ctx.Err() == nil {
		if answer, err = p.ask(address); err == nil && (pod == "" || pod == answer) {
			return answer, nil
		}
		if err == nil {
			err = fmt.Errorf("%s answers", answer)
		}
		time.Sleep(pause)
	}
	return "", overLimit(ctx, err)
}

// overLimit is the error of what did not succeed in time, or until the run was over.
func overLimit(ctx context.Context, last error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return fmt.Errorf("%w: %s", errOverLimit, fmt.Sprint(last)) // not wrapped: it is no failure of its own
}

func ask(address netip.AddrPort) (string, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return "", err
	}
	defer unix.Close(fd)
	if err := connect(fd, address); err != nil {
		return "", fmt.Errorf("connect: %w", err)
	}
	tv := unix.NsecToTimeval(answerTimeout.Nanoseconds())
	if err := errors.Join(unix.SetNonblock(fd, false),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv)); err != nil {
		return "", err
	}
	if _, err := unix.Write(fd, []byte("hello\n")); err != nil {
		return "", err
	}
	var line []byte
	buffer := make([]byte, 512)
	for !bytes.ContainsRune(line, '\n') {
		n, err := unix.Read(fd, buffer)
		if err != nil {
			return "", fmt.Errorf("answer: %w", err)
		}
		if n == 0 {
			return "", errors.New("answer: closed")
		}
		line = append(line, buffer[:n]...)
	}
	var answer struct{ Pod string }
	return answer.Pod, json.Unmarshal(line, &answer)
}

// connect gives up after connectTimeout. A blocking connect would do so at ticks of the kernel's
// clock, which may be twice as late.
func connect(fd int, address netip.AddrPort) error {
	err := unix.Connect(fd, &unix.SockaddrInet4{Addr: address.Addr().As4(), Port: int(address.Port())})
	if !errors.Is(err, unix.EINPROGRESS) {
		return err
	}
	for until := time.Now().Add(connectTimeout); ; {
		left := time.Until(until)
		if left <= 0 {
			return os.ErrDeadlineExceeded
		}
		wait := unix.NsecToTimespec(left.Nanoseconds())
		n, err := unix.Ppoll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}, &wait, nil)
		switch {
		case err != nil && !errors.Is(err, unix.EINTR):
			return err
		case n <= 0:
			continue
		}
		number, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
		if err != nil {
			return err
		}
		if number != 0 {
			return unix.Errno(number)
		}
		return nil
	}
}
