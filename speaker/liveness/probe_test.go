package liveness

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/nstest"
)

func TestAnswers(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := listener.Addr().(*net.TCPAddr).AddrPort()
	if !Answers(t.Context(), addr) {
		t.Error("a port that is open does not answer")
	}
	listener.Close()
	if !Answers(t.Context(), addr) {
		t.Error("a port that is closed does not answer")
	}
	// The discard prefix (RFC 6666) is routed nowhere.
	if Answers(t.Context(), netip.AddrPortFrom(netip.MustParseAddr("100::1"), addr.Port())) {
		t.Error("an address without a node answers")
	}
}

// A packet filter that drops gossip, or a queue that is full, does not make a dead node.
func TestAPortThatIsSilentIsNotADeadNode(t *testing.T) {
	nstest.New(t) // the right to ask, or the test is skipped
	socket, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(socket)
	if err := syscall.Bind(socket, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Listen(socket, 0); err != nil { // and nobody accepts
		t.Fatal(err)
	}
	name, err := syscall.Getsockname(socket)
	if err != nil {
		t.Fatal(err)
	}
	addr := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), uint16(name.(*syscall.SockaddrInet4).Port))
	for range 8 {
		conn, err := net.DialTimeout("tcp", addr.String(), 200*time.Millisecond)
		if err != nil {
			if !Answers(t.Context(), addr) {
				t.Error("the node counts as dead")
			}
			return
		}
		defer conn.Close()
	}
	t.Fatal("the queue does not fill")
}

func TestPing(t *testing.T) {
	a, b := nstest.New(t), nstest.New(t)
	nstest.Veth(t, a, "eth0", "172.26.236.177/24", b, "eth0", "172.26.236.178/24")
	a.Run(t, "ip", "addr", "add", "fd00::177/64", "dev", "eth0", "nodad")
	b.Run(t, "ip", "addr", "add", "fd00::178/64", "dev", "eth0", "nodad")
	asks := func(to string, patience time.Duration) (answered bool) {
		a.Do(t, func() error {
			answered = anyAnswered(patience, ping(netip.MustParseAddr(to)))
			return nil
		})
		return answered
	}
	for _, to := range []string{"172.26.236.178", "fd00::178"} {
		if !asks(to, 10*time.Second) {
			t.Errorf("%s does not answer", to)
		}
	}
	b.Run(t, "ip", "link", "set", "eth0", "down")
	for _, to := range []string{"172.26.236.178", "fd00::178"} {
		if asks(to, 100*time.Millisecond) {
			t.Errorf("%s answers, and its link is down", to)
		}
	}
}

// stops waits until a process that was sent SIGSTOP is stopped, and returns false if it has ended
// before.
func stops(t *testing.T, pid int) bool {
	t.Helper()
	const notReaped = unix.WNOWAIT
	var info unix.Siginfo
	if err := unix.Waitid(unix.P_PID, pid, &info, unix.WSTOPPED|unix.WEXITED|notReaped, nil); err != nil {
		t.Fatal(err)
	}
	return info.Code == cldStopped
}

// cldStopped is CLD_STOPPED of asm-generic/siginfo.h.
const cldStopped = 5

// An answer counts that has arrived while the program that waits for it got no CPU time.
func TestAnAnswerThatNobodyReadCounts(t *testing.T) {
	const child, patience = "LANDFALL_TEST_PING", time.Second
	if to := os.Getenv(child); to != "" {
		fmt.Println("answered:", anyAnswered(patience, ping(netip.MustParseAddr(to))))
		return
	}
	a, b := nstest.New(t), nstest.New(t)
	nstest.Veth(t, a, "eth0", "172.26.236.177/24", b, "eth0", "172.26.236.178/24")
	b.Run(t, "sysctl", "-qw", "net.ipv4.icmp_echo_ignore_all=1") // this test answers
	var cmd *exec.Cmd
	var said bytes.Buffer
	var asked net.PacketConn
	var buf [256]byte
	var from net.Addr
	for stopped := false; !stopped; { // again if this process got no time until the child's patience was over
		b.Do(t, func() (err error) {
			asked, err = net.ListenPacket("ip4:icmp", "172.26.236.178")
			return err
		})
		defer asked.Close()
		said.Reset()
		cmd = exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$")
		cmd.Env, cmd.Stdout = append(os.Environ(), child+"=172.26.236.178"), &said
		a.Do(t, cmd.Start)
		var err error
		if _, from, err = asked.ReadFrom(buf[:]); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Process.Signal(syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		if stopped = stops(t, cmd.Process.Pid); !stopped {
			_ = cmd.Wait()
		}
	}
	if _, err := asked.WriteTo(echoRequest(0, binary.BigEndian.Uint64(buf[8:])), from); err != nil {
		t.Fatal(err)
	}
	time.Sleep(patience + patience/4)
	if err := cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil || !strings.Contains(said.String(), "answered: true") {
		t.Errorf("%v, %s", err, said.String())
	}
}

// FuzzIsReply checks that a packet that anybody sent is an answer only with the nonce where it belongs, and that an
// answer is one with any IP header.
func FuzzIsReply(f *testing.F) {
	const nonce = 0x0102030405060708
	header := append([]byte{0x45}, make([]byte, 19)...)
	f.Add(append(header, echoRequest(0, nonce)...), true, byte(0), uint64(nonce), byte(5))
	f.Add(append(header, echoRequest(8, nonce)...), true, byte(0), uint64(nonce), byte(15))
	f.Add(echoRequest(129, nonce), false, byte(129), uint64(nonce), byte(0))
	f.Add(echoRequest(129, nonce)[:echoSize-1], false, byte(129), uint64(nonce), byte(1))
	f.Add([]byte{0x4f}, true, byte(0), uint64(0), byte(7))
	f.Add([]byte{}, true, byte(0), uint64(0), byte(0))
	f.Fuzz(func(t *testing.T, packet []byte, withHeader bool, kind byte, nonce uint64, words byte) {
		sent := binary.BigEndian.AppendUint64(nil, nonce)
		if isReply(packet, withHeader, kind, nonce) &&
			(!bytes.Contains(packet, sent) || bytes.IndexByte(packet, kind) < 0) {
			t.Errorf("%x is a reply of kind %d with nonce %x", packet, kind, sent)
		}
		answer := echoRequest(kind, nonce)
		header := make([]byte, max(1, words%16)*4)
		header[0] = 0x40 | byte(len(header)/4)
		if !isReply(append(header, answer...), true, kind, nonce) || !isReply(answer, false, kind, nonce) {
			t.Errorf("%x is no reply, with a header of %d bytes or without", answer, len(header))
		}
		if isReply(answer, false, kind, nonce+1) || isReply(answer, false, kind+1, nonce) ||
			isReply(answer[:echoSize-1], false, kind, nonce) {
			t.Errorf("%x answers another request", answer)
		}
	})
}
