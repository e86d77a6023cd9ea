package lab

import (
	"context"
	"crypto/tls"
	"crypto/x509/pkix"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"path"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/httpstream"
	"k8s.io/apimachinery/pkg/util/httpstream/spdy"
)

// kubeletPort is where the API server looks for a kubelet.
const kubeletPort = "10250"

// shownSuffix ends the names of the pods that ServeExec makes.
const shownSuffix = "-0"

// ServeExec has the API server show a pod for each set of agents, run commands in them, read their
// logs and connect to their ports, as kubelets do: "kubectl exec", "kubectl logs" and "kubectl
// port-forward" work. It ends with ctx.
func (l *Lab) ServeExec(ctx context.Context) error {
	if err := l.createPods(ctx); err != nil {
		return err
	}
	for _, n := range l.cluster.Nodes {
		if err := l.serveExec(ctx, n); err != nil {
			return fmt.Errorf("serve exec on %s: %w", n.Name, err)
		}
	}
	return nil
}

// createPods creates the pods of the chart's DaemonSets and Deployments.
func (l *Lab) createPods(ctx context.Context) error {
	sets, err := l.kube.AppsV1().DaemonSets(Namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	deployments, err := l.kube.AppsV1().Deployments(Namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	type owner struct {
		name     string
		template corev1.PodTemplateSpec
	}
	var owners []owner
	for _, o := range sets.Items {
		owners = append(owners, owner{o.Name, o.Spec.Template})
	}
	for _, o := range deployments.Items {
		owners = append(owners, owner{o.Name, o.Spec.Template})
	}
	for _, o := range owners {
		for _, n := range l.cluster.Nodes {
			if l.Agent(o.template.Spec.Containers[0].Name, n.Name) == nil {
				continue
			}
			// Another pod than that of the token, which may not change.
			if err := l.createPod(ctx, o.name+"-"+n.Name+shownSuffix, o.template, n); err != nil {
				return err
			}
		}
	}
	return nil
}

func (l *Lab) createPod(ctx context.Context, name string, template corev1.PodTemplateSpec, n Node) error {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: Namespace, Labels: template.Labels}, Spec: template.Spec,
	}
	pod.Spec.NodeName, pod.Spec.PriorityClassName = n.Name, ""
	pods := l.kube.CoreV1().Pods(Namespace)
	pod, err := pods.Create(ctx, pod, metav1.CreateOptions{FieldManager: fieldManager})
	if err != nil {
		return err
	}
	return l.ShowPod(ctx, pod.Name, true)
}

// ShowPod has the status of a pod say that its containers run, or that they crash again and again.
func (l *Lab) ShowPod(ctx context.Context, name string, running bool) error {
	pods := l.kube.CoreV1().Pods(Namespace)
	pod, err := pods.Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	pod.Status.Phase, pod.Status.ContainerStatuses = corev1.PodRunning, nil
	for _, c := range pod.Spec.Containers {
		status := corev1.ContainerStatus{Name: c.Name, Image: c.Image, Ready: running}
		if running {
			status.State.Running = &corev1.ContainerStateRunning{} // pods do not know when their programs began
		} else {
			status.State.Waiting = &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff"}
		}
		pod.Status.ContainerStatuses = append(pod.Status.ContainerStatuses, status)
	}
	_, err = pods.UpdateStatus(ctx, pod, metav1.UpdateOptions{FieldManager: fieldManager})
	return err
}

// serveExec listens where the API server looks for the kubelet of a node.
func (l *Lab) serveExec(ctx context.Context, n Node) error {
	cert, key, err := l.control.ca.issue(time.Now(), pkix.Name{CommonName: n.Name}, []net.IP{n.Addr.AsSlice()}, nil)
	if err != nil {
		return err
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return err
	}
	var listener net.Listener
	err = inNamespace(l.state.namespace(n.Name), func() (err error) {
		listener, err = (&net.ListenConfig{}).Listen(ctx, "tcp", net.JoinHostPort(n.Addr.String(), kubeletPort))
		return err
	})
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/exec/{namespace}/{pod}/{container}", func(w http.ResponseWriter, r *http.Request) {
		l.exec(ctx, w, r, n)
	})
	mux.HandleFunc("GET /containerLogs/{namespace}/{pod}/{container}", func(w http.ResponseWriter, r *http.Request) {
		l.containerLog(w, r, n)
	})
	mux.HandleFunc("/portForward/{namespace}/{pod}", func(w http.ResponseWriter, r *http.Request) {
		l.forward(ctx, w, r, n)
	})
	server := &http.Server{Handler: mux, ReadHeaderTimeout: requestTimeout}
	context.AfterFunc(ctx, func() { _ = server.Close() })
	go func() {
		_ = server.Serve(tls.NewListener(listener, &tls.Config{Certificates: []tls.Certificate{pair}}))
	}()
	return nil
}

// containerLog sends the last lines that an agent has written. The process before has no log of its
// own here.
func (l *Lab) containerLog(w http.ResponseWriter, r *http.Request, n Node) {
	a := l.Agent(r.PathValue("container"), n.Name)
	if a == nil || r.URL.Query().Get("previous") == "true" {
		http.Error(w, "previous terminated container not found", http.StatusBadRequest)
		return
	}
	lines, err := strconv.Atoi(r.URL.Query().Get("tailLines"))
	if err != nil {
		lines = math.MaxInt
	}
	_, _ = io.WriteString(w, tail(l.logPath(a.Name()), lines)+"\n") // the client has gone
}

// upgrade has a client speak SPDY and waits for so many streams, by their types. Without them all there
// is no connection.
func upgrade(ctx context.Context, w http.ResponseWriter, r *http.Request, protocol string, n int) (
	httpstream.Connection, map[string]httpstream.Stream) {
	if _, err := httpstream.Handshake(r, w, []string{protocol}); err != nil {
		return nil, nil
	}
	streams := make(chan httpstream.Stream, n)
	conn := spdy.NewResponseUpgrader().UpgradeResponse(w, r, func(s httpstream.Stream, _ <-chan struct{}) error {
		streams <- s
		return nil
	})
	if conn == nil {
		return nil, nil
	}
	byType := map[string]httpstream.Stream{}
	for len(byType) < n {
		select {
		case s := <-streams:
			byType[s.Headers().Get(corev1.StreamType)] = s
		case <-time.After(requestTimeout):
			conn.Close()
			return nil, nil
		case <-ctx.Done():
			conn.Close()
			return nil, nil
		}
	}
	return conn, byType
}

// exec runs a command in an agent's container, and sends what it writes over SPDY, in version 4 of
// the protocol.
func (l *Lab) exec(ctx context.Context, w http.ResponseWriter, r *http.Request, n Node) {
	conn, byType := upgrade(ctx, w, r, "v4.channel.k8s.io", 3)
	if conn == nil {
		return
	}
	defer conn.Close()
	out, err := l.runIn(r.Context(), r.PathValue("container"), n, r.URL.Query()["command"])
	status := metav1.Status{Status: metav1.StatusSuccess}
	to := byType[corev1.StreamTypeStdout]
	if err != nil {
		status = metav1.Status{Status: metav1.StatusFailure, Message: err.Error()}
		to = byType[corev1.StreamTypeStderr]
		out = err.Error()
	}
	_, _ = to.Write([]byte(out)) // the client has gone
	_ = json.NewEncoder(byType[corev1.StreamTypeError]).Encode(status)
}

// runIn runs a command of an agent's own program.
func (l *Lab) runIn(ctx context.Context, container string, n Node, command []string) (string, error) {
	a := l.Agent(container, n.Name)
	switch {
	case a == nil:
		return "", fmt.Errorf("no container %s on %s", container, n.Name)
	case len(command) == 0 || path.Base(command[0]) != "landfall-"+a.Program:
		return "", fmt.Errorf("the container has no program %q", command)
	case !a.Running():
		return "", errors.New("the container does not run")
	}
	out, err := a.Run(ctx, command[1:]...)
	if err != nil {
		return "", errors.New(strings.TrimSpace(out))
	}
	return out, nil
}
