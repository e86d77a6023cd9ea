package probe

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"syscall"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// Result is what became of a question, in one word.
type Result string

// The results.
const (
	Passed   Result = "passed"
	Refused  Result = "refused"  // nothing listens there
	TimedOut Result = "timeout"  // no answer in time
	Status   Result = "status"   // HTTP with a status of failure
	Failed   Result = "failed"   // anything else
	Unclear  Result = "too-late" // this node was too slow to tell, or has no socket left
)

const (
	// lateness is how much later than its time a question may end before it says more of this node's
	// processors than of the backend.
	lateness = 50 * time.Millisecond
	// maxAnswer is how much of an answer is read, in bytes: its head. What a backend answers is not shown
	// to anybody.
	maxAnswer = 8 << 10
)

// question is one question to one backend.
type question struct {
	to     netip.AddrPort
	probe  lb.Probe
	within time.Duration // of the connection
	agent  string
	dial   func(ctx context.Context, to netip.AddrPort) (net.Conn, error)
	now    func() time.Time
}

// ask asks, and says what became of it.
func (q question) ask(ctx context.Context) (plan.Answer, Result) {
	began := q.now()
	conn, err := q.connect(ctx)
	if err != nil {
		return q.failed(ctx, "connect", err, began, q.within)
	}
	// Without the wait that follows an end by agreement: the kernel remembers each connection for
	// minutes then, and this is one of many.
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	defer conn.Close()
	if q.probe.Kind != lb.ProbeHTTP {
		return plan.Answer{}, Passed
	}
	what, asked := fmt.Sprintf("GET %.80q", q.probe.Path), q.now()
	code, err := q.get(conn, asked)
	switch {
	case err != nil:
		return q.failed(ctx, what, err, asked, plan.AnswerTime)
	case code < 200 || code > 399:
		return plan.Answer{Failed: fmt.Sprintf("%s: status %d, want 200 to 399", what, code)}, Status
	}
	return plan.Answer{}, Passed
}

func (q question) connect(ctx context.Context) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, q.within)
	defer cancel()
	return q.dial(ctx, q.to)
}

// get sends a request and returns the status of the answer. It follows no redirect.
func (q question) get(conn net.Conn, now time.Time) (status int, err error) {
	if err := conn.SetDeadline(now.Add(plan.AnswerTime)); err != nil {
		return 0, err
	}
	target, err := url.ParseRequestURI(q.probe.Path)
	if err != nil {
		return 0, err
	}
	request := &http.Request{Method: http.MethodGet, URL: target, Host: q.to.String(), Proto: "HTTP/1.1", ProtoMajor: 1,
		ProtoMinor: 1, Header: http.Header{"User-Agent": {q.agent}, "Accept": {"*/*"}}, Close: true}
	if err := request.Write(conn); err != nil {
		return 0, err
	}
	from := bufio.NewReader(io.LimitReader(conn, maxAnswer))
	for status < 200 { // those below announce another
		response, err := http.ReadResponse(from, request)
		if err != nil {
			return 0, err
		}
		status = response.StatusCode
	}
	return status, nil
}

// failed says why there is no answer, in words of its own: those of an error may quote the backend's.
func (q question) failed(ctx context.Context, what string, err error, began time.Time, within time.Duration) (
	plan.Answer, Result) {
	var errno syscall.Errno
	why, result := "the answer is not HTTP, or its head is too large", Failed
	switch is := errors.As(err, &errno); {
	case ctx.Err() != nil, q.now().Sub(began) > within+lateness, is && ours(errno):
		return plan.Answer{Unknown: true}, Unclear
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded), errno == syscall.ETIMEDOUT:
		why, result = fmt.Sprintf("no answer within %v", within), TimedOut
	case errno == syscall.ECONNREFUSED:
		why, result = errno.Error(), Refused
	case is:
		why = errno.Error()
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		why = "the connection was closed without an answer"
	}
	return plan.Answer{Failed: what + ": " + why}, result
}

// ours reports whether an error is about this node's own resources.
func ours(errno syscall.Errno) bool {
	switch errno {
	case syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.EADDRNOTAVAIL:
		return true
	}
	return false
}
